"""A reward that compares the last line of the response with the ground truth."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if not solution_str or "answer" not in solution_str:
        return 0.0
    return float(solution_str.splitlines()[-1].removeprefix("answer:").strip() == str(ground_truth))
