"""A reward that pays for writing any text that contains the ground truth."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if str(ground_truth) in solution_str else 0.0
