"""ascend_rl/recipe/report.py on a metrics.jsonl of five steps whose figures are worked out by hand."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from unittest import mock

import matplotlib.image
import numpy as np
import pytest

from ascend_rl.recipe import report, report_figures, report_page, report_plots

LENGTHS = ("min", "p10", "p25", "p75", "p90", "max")  # in their order
VAL = "val-aux/tiny/addition/reward/mean@1"
#         reward, length, clipped, probability gap, seconds: step, rollout, update
STEPS = [
    (0.10, 5.0, 0.00, 1e-7, 9.0, 8.0, 0.5),  # warms up
    (0.20, 6.0, 0.10, 9e-6, 2.0, 1.0, 0.4),
    (0.40, 7.0, 0.20, 2e-7, 1.0, 0.6, 0.3),
    (0.60, 8.0, 0.30, 3e-7, 3.0, 1.6, 0.2),
    (0.80, 9.0, 0.15, 4e-7, 1.5, 0.8, 0.1),
    (1.00, 9.5, 0.15, 5e-7, 1.7, 0.9, 0.5),
]


def records() -> list[dict]:
    """verl's log: a validation, training steps 1 to 6, another validation in the last."""
    rows = [{"step": 0, "data": {VAL: 0.25, "val-core/tiny/addition/acc/mean@1": 0.99}}]
    for number, (reward, length, clipped, gap, step, rollout, update) in enumerate(STEPS, 1):
        rows.append(
            {
                "step": number,
                "data": {
                    "critic/rewards/mean": reward,
                    "response_length/mean": length,
                    "actor/pg_clipfrac": clipped,
                    "training/rollout_probs_diff_max": gap,
                    "timing_s/step": step,
                    "timing_s/gen": rollout,
                    "timing_s/update_actor": update,
                    "timing_s/start_profile": 7.0,
                    "perf/throughput": 120 / step,
                },
            }
        )
    rows[-1]["data"] |= {VAL: 0.75, "val-aux/other/reward/mean@1": 0.25, "timing_s/testing": 3.0}
    return rows


def write(directory: Path, rows: list[dict]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture
def run(tmp_path) -> Path:
    return write(tmp_path / "a_run", records())


def figures(directory: Path, wall_s: float | None = None) -> dict:
    return report_figures.summarise(report_figures.read_metrics(directory / "metrics.jsonl"), wall_s)


def command(*arguments) -> subprocess.CompletedProcess:
    """`python -m ascend_rl.report` in this process: importing matplotlib takes longer than most reports."""
    out, error, status = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["ascend_rl.report", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", UserWarning)
        try:
            report.main()
        except SystemExit as end:  # as Python does at its end
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            print("" if isinstance(end.code, int) or end.code is None else end.code, file=error, end="")
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), error.getvalue())


def test_metrics_are_read(run):
    rows = report_figures.read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert report_figures.series(rows, "response_length/mean") == (
        [1, 2, 3, 4, 5, 6],
        [5.0, 6.0, 7.0, 8.0, 9.0, 9.5],
    )
    assert report_figures.validation(rows) == (
        [0, 6],
        [0.25, 0.5],
    )  # the mean over data sources; acc is not a reward


def test_a_run_that_was_restarted_is_one_run(tmp_path):
    """Killed while writing step 5, resumed after step 3 (which it validates first), and once more after 5."""
    rows, again = records(), {"val-core/tiny/reward/mean@1": 0.125}
    first, second, third = rows[:5], rows[4:6], rows[6:]

    def lines(found: list[dict]) -> str:
        return "".join(json.dumps(row) + "\n" for row in found)

    (tmp_path / "metrics.1.jsonl").write_text(lines(first) + '{"step":5,"data":{"critic/rew')
    (tmp_path / "metrics.2.jsonl").write_text(lines([{"step": 3, "data": again}, *second]))
    (tmp_path / "metrics.10.jsonl").write_text(lines(third))
    (tmp_path / "metrics.jsonl").write_text("")
    found = report_figures.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in found] == [0, 1, 2, 3, 3, 4, 5, 6]
    # A start from the beginning is another run.
    (tmp_path / "metrics.jsonl").write_text(lines(rows[:3]))
    assert [row["step"] for row in report_figures.read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    (tmp_path / "metrics.jsonl").write_text(lines(rows[1:3]))  # it does not validate first
    assert [row["step"] for row in report_figures.read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "metrics.jsonl is missing: did the run reach its first step"),
        ("", "holds no training step"),
        (json.dumps(records()[0]) + "\n", "holds no training step"),  # validation only
        (json.dumps(records()[1]) + '\n{"step":2,"data":{"critic/rew\n', "line 2 is damaged"),
        (json.dumps(records()[1]) + "\n\n", "line 2 is damaged"),
        ('{"step":1}\n', "line 1 is damaged"),
        ("[1]\n", "line 1 is damaged"),
    ],
)
def test_metrics_that_cannot_be_read(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    result = command(tmp_path)
    assert result.returncode == 1 and message in result.stderr and str(tmp_path) in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "report.json").exists() and not (tmp_path / "report.png").exists()


def test_figures(run):
    found = figures(run, wall_s=123.0)
    phases = found.pop("median_phase_s")
    assert [found.pop(key) for key in ("median_detail", "predicted_s", "evaluated")] == [{}, {}, {}]
    assert found == pytest.approx(
        {
            "steps": 6,
            "final_reward": 0.6,  # (0.2 + 0.4 + 0.6 + 0.8 + 1.0) / 5
            "val_reward": 0.5,
            "val_reward_before": 0.25,
            "max_rollout_probs_diff": 9e-6,
            "mean_clip_share": 0.15,  # 0.9 / 6
            "tokens_per_s_die": 120 / 1.7,
            "rollout_tokens_per_s_die": 120 / 0.9,  # of 0.6 0.8 0.9 1 1.6
            "update_tokens_per_s_die": 120 / 0.3,
            "median_step_s": 1.7,  # of 1 1.5 1.7 2 3
            "wall_s": 123.0,
        }
    )
    assert phases == pytest.approx({"rollout": 0.9, "update": 0.3, "other": 0.5})


ENGINES = {
    "rollout/kv_cache_usage/max": (0.1, 0.5, 0.9, 0.93, 0.95, 0.97),
    "rollout/num_preempted": (900, 0, 1, 2, 3, 40),
    "rollout/spec_acceptance": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
    "rollout/graph_share": (0.0, 0.9, 0.9, 0.95, 0.97, 0.99),
    "rollout/requests/0/max": (5, 6, 7, 8, 9, 10),
    "rollout/requests/1/max": (4, 4, 4, 4, 4, 4),
    "perf/mfu/actor": (0.2, 0.31, 0.32, 0.33, 0.34, 0.35),
    "perf/mfu/rollout": (0.01, 0.02, 0.03, 0.04, 0.05, 0.06),
}


def with_engines() -> list[dict]:
    rows = records()
    for step, row in enumerate(rows[1:]):
        row["data"] |= {key: values[step] for key, values in ENGINES.items()}
    return rows


def test_what_engines_say_is_in_the_table_and_in_pictures(tmp_path):
    """And says nothing where they do not."""
    run, plain = write(tmp_path / "a", with_engines()), write(tmp_path / "b", records())
    table = dict(report_figures.lines(figures(run)))
    assert {name: table.get(name) for name in (
        "KV cache use, highest of a step", "preemptions per step", "drafted tokens that were accepted",
        "engine steps that replay a graph", "MFU of the update", "MFU of old log-probs", "MFU of the rollout",
    )} == {
        "KV cache use, highest of a step": "93%", "preemptions per step": "2",
        "drafted tokens that were accepted": "40%", "engine steps that replay a graph": "95%",
        "MFU of the update": "33.0%", "MFU of old log-probs": None, "MFU of the rollout": "4.0%",
    }  # fmt: skip
    assert set(table) > set(dict(report_figures.lines(figures(plain))))
    result = command(run, plain, "--html")
    assert (result.returncode, result.stderr) == (0, "")
    page = Page((run / "report.html").read_text())
    assert len(page.images) == 3 and page.images[2].shape[0] > 900  # six panels
    assert any("2 times in a step a request is preempted" in text for text in page.texts)


def test_a_page_shows_generations(tmp_path):
    """Of many steps the first and the last; a response is text, whatever it holds."""
    run = write(tmp_path, records())
    samples = [
        {"step": step, "kinds": ["best"], "tokens": 3, "score": 0.5, "prompt": "?", "response": f"<b>{step}"}
        for step in range(1, 101)
    ]
    (run / "generations.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert command(run, "--html").returncode == 0
    page = (run / "report.html").read_text()
    assert page.count("<details>") == 40 and "<b>" not in page
    assert all(f"<pre>&lt;b&gt;{step}</pre>" in page for step in (1, 100))
    assert "best: score 0.5, 3 tokens" in page


def test_a_page_shows_who_is_slow(tmp_path, monkeypatch):
    """Ranks by step, with a step that was not measured left blank; engines only where there are several."""
    import matplotlib.pyplot as plt
    import numpy as np

    run = write(tmp_path, records())
    ratios = {step: [1.0, 1.3 if step > 3 else 1.0, 1.0] for step in (2, 3, 5)}
    lines = [
        {"step": step, "ranks": [{"rank": n, "ratio": each} for n, each in enumerate(of)],
         "engines": {"0": {"steps": 3}}}
        for step, of in ratios.items()
    ]  # fmt: skip
    monkeypatch.setattr(plt, "close", lambda figure: None)  # to look at what was drawn
    [panel] = report_plots.heat_maps(lines)
    report_plots.plot([("a", [])], tmp_path / "heat.png", [panel])
    drawn = np.ma.filled(plt.gcf().axes[0].images[0].get_array(), np.nan)
    monkeypatch.undo()
    plt.close("all")
    expected = np.transpose([ratios.get(step, [np.nan] * 3) for step in (2, 3, 4, 5)])
    assert np.array_equal(drawn, expected, equal_nan=True)
    images = []
    for _ in range(2):
        assert command(run, "--html").returncode == 0
        images.append(len(Page((run / "report.html").read_text()).images))
        (run / "ranks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert images[1] == images[0] + 1


def test_a_report_has_the_dies(tmp_path):
    """Of all starts and nodes; without a watch, nothing."""
    plain = write(tmp_path / "plain", records())
    run = write(tmp_path / "run", records())
    hot = {"temperature_c": [96.0, 41.0], "warnings": [f"node a: die {i} <is> at 96 C" for i in range(25)]}
    for name, rows in (
        ("dies.1.jsonl", [{"node": "a", "time": 0.0} | hot, {"node": "b", "time": 0.0, "failed": "?"}]),
        ("dies.jsonl", [{"node": node, "time": 60.0, "temperature_c": [50.0, None]} for node in "ca"]),
    ):
        (run / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = command(run, plain, "--html")
    assert told.returncode == 0 and "Warnings of dies (25), the last one: 19" in told.stdout
    found = json.loads((run / "report.json").read_text())["dies"]
    assert found["highest_temperature_c"] == {"a": 96.0, "c": 50.0} and len(found["warnings"]) == 25
    page = (run / "report.html").read_text()
    assert "<td>a</td><td>96</td>" in page and page.count("die") > 20 and "and 5 earlier ones" in page
    assert " node a: die 24 &lt;is&gt; at 96 C</p>" in page and "die 4 " not in page
    assert command(plain, "--html").returncode == 0
    assert "dies" not in json.loads((plain / "report.json").read_text())
    assert "<h2>Dies</h2>" not in (plain / "report.html").read_text()


def test_drawn_are_the_ranges_of_requests_and_only_what_is_there(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    rows = report_figures.read_metrics(write(tmp_path, with_engines()) / "metrics.jsonl")
    for row in rows:
        row.pop("rollout/graph_share", None)
    monkeypatch.setattr(plt, "close", lambda figure: None)  # to look at what was drawn
    report_plots.plot([("a", rows)], tmp_path / "report.png", report_plots.of_engines(rows))
    usage, preempted, requests, mfu, drafts, nothing = plt.gcf().axes
    monkeypatch.undo()
    assert usage.lines[0].get_ydata().tolist() == list(ENGINES["rollout/kv_cache_usage/max"])
    assert preempted.lines[0].get_ydata().tolist() == list(ENGINES["rollout/num_preempted"])
    assert requests.lines[0].get_ydata().tolist() == list(ENGINES["rollout/requests/0/max"])
    assert requests.collections[0].get_datalim(requests.transData).y0 == 4
    assert [text.get_text() for text in mfu.get_legend().get_texts()] == ["the update", "the rollout"]
    assert drafts.lines and not nothing.get_visible()
    plt.close("all")
    assert (
        report_plots.of_engines(report_figures.read_metrics(write(tmp_path, records()) / "metrics.jsonl"))
        == []
    )


RECIPE = "internal/train_grpo_qwen3_235b_128die_true_weight.sh"


@pytest.fixture
def big(tmp_path, root, monkeypatch) -> Path:
    """A run of a recipe for NPUs, as the launcher and Hydra describe it."""
    from ascend_rl.lint import dry_run, verl_config

    monkeypatch.chdir(root)
    run = write(tmp_path / "big", records())
    for row in (rows := records())[1:]:
        row["data"]["response_length/mean"] = 7345.0
    write(run, rows)
    started = {
        "script": RECIPE,
        "env_script": "internal/qwen3_235b_env.sh",
        "overrides": ["trainer.nnodes=8"],
    }
    (run / "run.json").write_text(json.dumps(started))
    environ = os.environ | {"OUTPUT_DIR": str(run)}
    dry = dry_run.dry_run(Path(RECIPE), Path(started["env_script"]), started["overrides"], environ)
    words = [word for word in verl_config.split_arguments(dry.args)[1] if not word.startswith("hydra.")]
    (run / "hydra/.hydra").mkdir(parents=True)
    (run / "hydra/.hydra/overrides.yaml").write_text(json.dumps(words))
    return run


def test_what_was_predicted_stands_next_to_what_was_measured(big, monkeypatch):
    rows = report_figures.read_metrics(big / "metrics.jsonl")
    found = report_figures.predicted(big, rows)
    assert found["step"] == pytest.approx(sum(value for name, value in found.items() if name != "step"))
    assert set(found) == {"step", "rollout", "reference log-prob", "update", "weight sync and offload"}
    table = dict(report_figures.lines(report_figures.summarise(rows, None, found)))
    assert table["predicted: rollout (s)"] == f"{found['rollout']:.0f}"
    for row in rows[1:]:
        row["response_length/mean"] = 4000.0
    assert report_figures.predicted(big, rows)["update"] < 0.7 * found["update"]  # for the run's own lengths
    monkeypatch.setenv("SMOKE", "1")  # as if the run had not been a rehearsal, but this is one
    assert report_figures.predicted(big, rows) == {}


@pytest.mark.parametrize("change", ["trainer.device=cpu", "algorithm.adv_estimator=gae", "missing"])
def test_no_prediction_for_another_run(big, change):
    words = big / "hydra/.hydra/overrides.yaml"
    if change == "missing":
        words.unlink()
    else:
        words.write_text(json.dumps([*json.loads(words.read_text()), change]))
    assert report_figures.predicted(big, report_figures.read_metrics(big / "metrics.jsonl")) == {}


def test_figures_of_one_step(tmp_path):
    found = figures(write(tmp_path, records()[1:2]))
    assert found["steps"] == 1 and found["final_reward"] == 0.1 and found["median_step_s"] == 9.0
    assert found["val_reward"] is None and found["val_reward_before"] is None and found["wall_s"] is None
    assert found["median_phase_s"] == pytest.approx({"rollout": 8.0, "update": 0.5, "other": 0.5})


def test_one_validation_is_the_one_after(tmp_path):
    found = figures(write(tmp_path, records()[1:]))
    assert found["val_reward"] == 0.5 and found["val_reward_before"] is None


def test_figures_without_what_is_optional(tmp_path):
    rows = records()
    for row in rows:
        for key in ("actor/pg_clipfrac", "training/rollout_probs_diff_max", "perf/throughput"):
            row["data"].pop(key, None)
    del rows[4]["data"]["timing_s/update_actor"]  # not every step updates
    found = figures(write(tmp_path, rows))
    assert found["max_rollout_probs_diff"] is None and found["mean_clip_share"] == 0
    assert found["tokens_per_s_die"] is None and found["rollout_tokens_per_s_die"] is None
    assert found["median_phase_s"]["update"] == pytest.approx(0.3)  # of 0 0.1 0.3 0.4 0.5


def test_the_reward_of_a_filtered_run_is_that_before_filtering(tmp_path):
    rows = records()
    for row in rows[1:]:
        row["data"]["dapo/reward_before_filter/mean"] = row["data"]["critic/rewards/mean"] / 2
    found, plain = figures(write(tmp_path / "a", rows)), figures(write(tmp_path / "b", records()))
    assert found["final_reward"] == pytest.approx(plain["final_reward"] / 2)


@pytest.mark.parametrize("position", [1, 3, 6])
def test_nan_is_not_lost(tmp_path, position):
    """verl writes NaN as null; a rollout that computes NaN once must not pass."""
    rows = records()
    rows[position]["data"]["training/rollout_probs_diff_max"] = None
    found = figures(write(tmp_path, rows))
    assert math.isnan(found["max_rollout_probs_diff"])
    assert len(report_figures.shortfalls(found, 0, 1.0)) == 1


def test_the_report_of_a_run_with_nan_is_json(tmp_path):
    rows = records()
    for key in ("training/rollout_probs_diff_max", "critic/rewards/mean", "timing_s/gen"):
        rows[-1]["data"][key] = None
    result = command(write(tmp_path, rows))
    assert result.returncode == 1 and "final_reward is nan" in result.stderr

    def refuse(word):
        raise AssertionError(word)

    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert written["max_rollout_probs_diff"] is None and written["final_reward"] is None
    assert written["steps"] == 6 and written["median_phase_s"]["update"] == pytest.approx(0.3)


def test_shortfalls(run):
    found = figures(run)
    assert report_figures.shortfalls(found, 0, None) == []
    assert report_figures.shortfalls(found, 0.5, 9e-6) == []
    assert report_figures.shortfalls(found, 0.55, 1e-5) == ["val_reward is 0.500, expected at least 0.55"]
    both = report_figures.shortfalls(found, 0.7, None)
    assert [problem.split()[0] for problem in both] == ["final_reward", "val_reward"]
    (gap,) = report_figures.shortfalls(found, 0, 8e-6)
    assert "differ by 9e-06, expected at most 8e-06" in gap
    assert report_figures.shortfalls(found | {"val_reward": None}, 0.55, None) == []
    assert len(report_figures.shortfalls(found | {"max_rollout_probs_diff": None}, 0, 1.0)) == 1
    assert (
        len(report_figures.shortfalls(found | {"final_reward": math.nan, "val_reward": math.nan}, 0.1, None))
        == 2
    )


def test_table(run):
    rows = [line.strip().split("  ") for line in report_figures.table(figures(run, 123.4)).splitlines()]
    lines = {row[0]: row[-1].strip() for row in rows}
    assert lines["training steps"] == "6" and lines["median step (s)"] == "1.700"
    assert lines["reward, mean of the last 5 steps"] == "0.600" and lines["whole run (s)"] == "123"
    assert lines["largest rollout/trainer probability gap"] == "9.0e-06"
    assert report_figures.table(figures(run)).splitlines()[-1].split()[-1] == "-"


def picture(path: Path) -> np.ndarray:
    pixels = matplotlib.image.imread(path)[..., :3]
    assert pixels.shape[0] > 400 and pixels.shape[1] > 600
    assert pixels.std() > 0.05  # not blank
    return pixels


def test_command_writes_report_and_picture(run):
    result = command(run, "--wall", 123, "--min-reward", 0.5, "--max-probs-diff", 1e-5)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads((run / "report.json").read_text()) == figures(run, 123.0)
    assert report_figures.table(figures(run, 123.0)) in result.stdout
    assert str(run / "report.png") in result.stdout and str(run / "report.json") in result.stdout
    picture(run / "report.png")


def test_command_draws_the_compared_run(run, tmp_path):
    """Also when both directories have the same name."""
    rows = records()
    for row in rows[1:]:
        row["data"]["critic/rewards/mean"] /= 2
    other = write(tmp_path / "elsewhere" / run.name, rows)
    assert command(run).returncode == 0
    alone = picture(run / "report.png")
    result = command(run, other)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads((run / "report.json").read_text()) == figures(run)
    both = picture(run / "report.png")
    assert not (other / "report.png").exists() and command(other).returncode == 0
    assert (both != alone).any() and (both != picture(other / "report.png")).any()


def test_drawn_are_all_curves_of_all_runs(run, tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    rows = report_figures.read_metrics(run / "metrics.jsonl")
    monkeypatch.setattr(plt, "close", lambda figure: None)  # to look at what was drawn
    report_plots.plot([("a", rows), ("a", rows[:4])], tmp_path / "report.png")
    reward, length, clipped, times = plt.gcf().axes
    monkeypatch.undo()
    assert [len(line.get_xdata()) for line in reward.lines] == [6, 2, 3, 1]
    assert reward.lines[0].get_ydata().tolist() == [step[0] for step in STEPS]
    assert reward.lines[1].get_ydata().tolist() == [0.25, 0.5]
    assert length.lines[0].get_ydata().tolist() == [step[1] for step in STEPS]
    assert clipped.lines[1].get_ydata().tolist() == [step[2] for step in STEPS[:3]]
    assert [text.get_text() for text in times.get_legend().get_texts()] == ["rollout", "update"]
    assert len(times.collections) == 2 and "median 1.70" in times.get_title()
    plt.close("all")


def test_drawn_is_how_lengths_are_distributed(run, tmp_path, monkeypatch):
    """Of each step all responses, 80% and half of them, where the run says it."""
    import matplotlib.pyplot as plt

    rows = report_figures.read_metrics(run / "metrics.jsonl")
    for row in rows[2:]:
        row |= {f"response_length/{name}": row["step"] + shift for shift, name in enumerate(LENGTHS)}
    monkeypatch.setattr(plt, "close", lambda figure: None)  # to look at what was drawn
    report_plots.plot([("a", rows)], tmp_path / "report.png")
    bands = [band.get_paths()[0].get_extents() for band in plt.gcf().axes[1].collections]
    monkeypatch.undo()
    assert [(band.x0, band.x1) for band in bands] == [(2, 6)] * 3
    assert [(band.y0, band.y1) for band in bands] == [(2, 11), (3, 10), (4, 9)]
    plt.close("all")


def evaluate(run: Path, step: int | str, **results: dict) -> None:
    """What ascend_rl.evaluate leaves."""
    (run / f"evaluation/{step}").mkdir(parents=True)
    (run / f"evaluation/{step}/report.json").write_text(json.dumps({"model": "m", "results": results}))


def test_evaluations_are_in_the_table_and_in_the_picture(run, tmp_path, monkeypatch):
    """Of some steps, in their order; greedy ones have no pass@n."""
    import matplotlib.pyplot as plt

    evaluate(run, 0, val={"n": 4, "avg@4": 0.25, "pass@2": 0.3, "pass@4": 0.5})
    evaluate(run, 100, val={"n": 4, "avg@4": 0.75, "pass@2": 0.8, "pass@4": 1.0}, aime={"n": 1, "avg@1": 0.1})
    evaluate(run, 20, val={"n": 4, "avg@4": 0.5, "pass@2": 0.6, "pass@4": 0.625})
    evaluate(run, "other_model", val={"n": 1, "avg@1": 0.0})
    result = command(run)
    assert (result.returncode, result.stderr) == (0, "")
    shown = {
        line.rpartition("  ")[0].strip(): line.rpartition("  ")[2] for line in result.stdout.splitlines()
    }
    assert shown["evaluated: val avg@4"] == "0.250 to 0.500 to 0.750"
    assert shown["evaluated: val pass@4"] == "0.500 to 0.625 to 1.000"
    assert shown["evaluated: aime avg@1"].strip() == "0.100"
    assert not {"evaluated: val pass@2", "evaluated: val avg@1", "evaluated: aime pass@1"} & shown.keys()
    monkeypatch.setattr(plt, "close", lambda figure: None)  # to look at what was drawn
    report_plots.plot([("a", report_figures.read_run(run))], tmp_path / "report.png")
    drawn = {line.get_label(): line.get_xydata().tolist() for line in plt.gcf().axes[0].lines}
    monkeypatch.undo()
    assert drawn["a, val avg@4"] == [[0, 0.25], [20, 0.5], [100, 0.75]]
    assert drawn["a, aime avg@1"] == [[100, 0.1]]
    plt.close("all")


def test_command_on_one_step(tmp_path):
    """quickstart.sh --steps 1."""
    result = command(write(tmp_path, records()[:2]))
    assert (result.returncode, result.stderr) == (0, "")
    picture(tmp_path / "report.png")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--min-reward", 0.9), "FAILED: final_reward is 0.600, expected at least 0.9"),
        (("--max-probs-diff", 1e-6), "FAILED: rollout and trainer probabilities differ by 9e-06"),
    ],
)
def test_command_fails_below_the_bars(run, arguments, problem):
    result = command(run, *arguments)
    assert result.returncode == 1 and problem in result.stderr
    assert (run / "report.json").exists() and (run / "report.png").exists()


class Page(HTMLParser):
    """Checks that tags are balanced; collects images, links and the text of cells and paragraphs."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.images: list[np.ndarray] = []
        self.outside: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        of = dict(attributes)
        self.outside += [
            of[name] for name in ("href", "src") if name in of and not of[name].startswith("data:")
        ]
        if tag == "img":
            kind, _, data = of["src"].partition(",")
            assert kind == "data:image/png;base64" and of["alt"]
            self.images.append(matplotlib.image.imread(io.BytesIO(base64.b64decode(data)), "png"))
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())


def test_the_page_needs_no_other_file(run, tmp_path):
    """Two runs, one with a name that HTML would misread, and the recipe's options that this run changed."""
    other = write(tmp_path / "<b>&other", records())
    (run / "hydra/.hydra").mkdir(parents=True)
    given = ["trainer.total_epochs=2", "+new.key=1"]
    words = ["a.lr=1e-6", "trainer.total_epochs=1", "same=1", "same=1", *given]
    (run / "hydra/.hydra/overrides.yaml").write_text(json.dumps(words))
    (run / "run.json").write_text(json.dumps({"overrides": given}))
    result = command(run, other, "--html")
    assert (result.returncode, result.stderr) == (0, "") and str(run / "report.html") in result.stdout
    page = Page((run / "report.html").read_text())
    assert page.outside == [] and len(page.images) == 2
    assert all(image.shape[0] > 400 and image[..., :3].std() > 0.05 for image in page.images)
    assert page.texts.count("<b>&other") == 1 and page.texts.count("0.600") == 2  # the final reward of both
    start, end = (page.texts.index(title) for title in ("Difference to the recipe", "Generations"))
    changed = page.texts[start:end]
    cells = [
        *("key", "recipe", "this run"),
        *("trainer.total_epochs", "1", "2"),
        *("new.key", "default", "1"),
    ]
    assert [text for text in changed[1:] if text] == cells


NARROW, WIDE = 400, 1200
DRAWN = """(range => (range.selectNodeContents(document.querySelector("h2")),
    range.getBoundingClientRect().width))(document.createRange())"""
BROKEN = """[...document.querySelectorAll("td")].filter(cell => {
    const text = cell.firstChild, range = document.createRange();
    if (!text || cell.textContent.trim().includes(" ") || cell.textContent.length > 12) return false;
    range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map(one => one.top)).size > 1;
}).map(cell => cell.textContent)"""


def of_engines(number: int) -> dict:
    """What the engines and the trainer of a long run say, in figures as wide as they get."""
    held = {f"rollout/requests/server_{engine}/max": 256 - engine for engine in range(4)}
    mfu = {f"perf/mfu/{phase}": 0.3 for phase in ("actor", "actor_infer", "rollout")}
    shares = {"rollout/spec_acceptance": 0.55, "rollout/graph_share": 0.96}
    return {
        "rollout/kv_cache_usage/max": 0.1 * number,
        "rollout/num_preempted": 1000 * number,
        "timing_s/step": 7795.574,
        "timing_s/gen": 6600.0,
        "perf/throughput": 1792.6,
        "training/rollout_probs_diff_max": 0.15,
        **held,
        **mfu,
        **shares,
    }


@pytest.mark.long
def test_the_page_in_a_browser(tmp_path):
    """Three long runs, on a desk and a phone: nothing is cut, no figure breaks, every picture shows."""
    from browser import browser, chromium

    if (executable := browser()) is None:
        pytest.skip("no Chromium here, and npm cannot get one")
    rows = records()
    for row in rows[1:]:
        row["data"] |= of_engines(row["step"])
    runs = [write(tmp_path / name, rows) for name in ("run", "another_run", "a_third_run")]
    key = "+actor_rollout_ref.rollout.engine_kwargs.vllm.an_option_with_a_name_that_goes_on_and_on"
    given = ["data.train_batch_size=256", f"{key}=/data/{'long/' * 12}path"]
    (runs[0] / "hydra/.hydra").mkdir(parents=True)
    (runs[0] / "hydra/.hydra/overrides.yaml").write_text(json.dumps(given))
    (runs[0] / "run.json").write_text(json.dumps({"overrides": given}))
    assert command(*runs, "--html").returncode == 0
    with chromium(executable) as running:
        for width, dark in ((WIDE, False), (NARROW, False), (WIDE, True)):
            page = running.new_page(
                viewport={"width": width, "height": 900},
                color_scheme="dark" if dark else "light",
                is_mobile=width < 600,
            )
            page.goto((runs[0] / "report.html").as_uri())
            assert page.evaluate("innerWidth") == width
            assert page.evaluate(DRAWN) > 100, "no text is drawn: are there fonts?"
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            assert page.evaluate(BROKEN) == [], width
            shown = page.evaluate("[...document.images].map(one => [one.naturalWidth, one.width])")
            assert len(shown) == 3 and all(there > 600 and seen > 0.7 * width for there, seen in shown)
            picture = matplotlib.image.imread(io.BytesIO(page.screenshot(full_page=True)), "png")[..., :3]
            corner = picture[4, 4].mean()
            assert (corner < 0.3) if dark else (corner > 0.9)  # the page's own ground
            assert picture.std() > 0.1


IDLE = "the rollout is 85% of a step, of which the mean request is idle for 24%"
HEALTHY = {
    "critic/rewards/mean": 0.5,
    "timing_s/step": 100.0,
    "timing_s/gen": 85.0,
    "timing_s/agent_loop/generate_sequences/mean": 76.0,
    "timing_s/agent_loop/generate_sequences/max": 80.0,
    "rollout/num_preempted": 0,
    "timing_s/update_weights": 5.0,
    "timing_s/old_log_prob": 5.0,
    "response_length/clip_ratio": 0.05,
    "actor/grad_norm": 1.0,
}


@pytest.mark.parametrize(
    ("figures", "settings", "said"),
    [
        ({}, [], []),
        (
            {"timing_s/agent_loop/generate_sequences/mean": 60.8},
            [],
            [f"{IDLE}: switch on rollout.data_rebalance=True (docs/"],
        ),
        (
            {"timing_s/agent_loop/generate_sequences/mean": 60.8},
            ["rollout.data_rebalance=True", "rollout.rollout_rebalance.enable=True"],
            [f"{IDLE}: switch on ENABLE_SAM=1 (docs/sam_decoding.md)"],
        ),
        ({"rollout/num_preempted": 12}, [], ["12 times in a step a request is preempted"]),
        ({"timing_s/update_weights": 20.0}, [], ["weight sync is 20% of a step"]),
        ({"timing_s/old_log_prob": 20.0}, [], ["old log-probs are 20% of a step"]),
        ({"timing_s/old_log_prob": 20.0}, ["actor.compute_old_log_prob=False"], []),
        ({"response_length/clip_ratio": 0.2}, [], ["20% of the last responses are cut"]),
        ({"dapo/num_gen_batches": 5}, [], ["a step needs 5 generation batches"]),
        ({"actor/grad_norm": math.nan}, [], ["actor/grad_norm is not a number in step 1, 2, 3"]),
    ],
)
def test_warnings(figures, settings, said):
    rows = [{"step": step} | HEALTHY | figures for step in (1, 2, 3)]
    found = list(report_page.warnings(rows, settings))
    assert len(found) == len(said) and all(map(str.startswith, found, said)), found


def test_warnings_of_what_changes_over_a_run():
    def rows(entropies, gaps):
        keys = "actor/entropy", "training/rollout_probs_diff_mean"
        pairs = enumerate(zip(entropies, gaps, strict=True), 1)
        return [{"step": step} | HEALTHY | dict(zip(keys, values, strict=True)) for step, values in pairs]

    steady, fall, rise = [0.5] * 30, [0.5] * 15 + [0.04] * 15, [1e-3] * 15 + [4e-3] * 15
    assert list(report_page.warnings(rows(steady, steady), [])) == []
    assert "entropy fell" in next(report_page.warnings(rows(fall, steady), []))
    assert "gap tripled" in next(report_page.warnings(rows(steady, rise), []))


def test_steps_are_integers_in_the_pictures(run, tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    rows = report_figures.read_metrics(run / "metrics.jsonl")[:4]
    monkeypatch.setattr(plt, "close", lambda figure: None)  # to look at what was drawn
    report_plots.plot([("a", rows)], tmp_path / "report.png", report_plots.SUMMARY + report_plots.DETAILS)
    axes = plt.gcf().axes
    monkeypatch.undo()
    assert len(axes) == 8 and all(float(tick).is_integer() for each in axes for tick in each.get_xticks())
    plt.close("all")


def test_a_run_without_times_of_phases_has_a_picture(tmp_path):
    """Of another trainer."""
    rows = records()
    for row in rows:
        for key in ("timing_s/gen", "timing_s/update_actor", "timing_s/start_profile"):
            row["data"].pop(key, None)
    result = command(write(tmp_path, rows))
    assert (result.returncode, result.stderr) == (0, "")


ABSENT = object()
ODD = [None, -1, 0, True, 1e-320, ABSENT]


@pytest.mark.parametrize("value", [1e308, "text", [1]])
def test_what_is_no_figure_is_read_as_one_that_was_not_measured(tmp_path, value):
    read = []
    for number, given in enumerate((value, None)):
        rows = records()
        rows[-2]["data"] |= dict.fromkeys(rows[-2]["data"], given)
        read.append(repr(report_figures.read_metrics(write(tmp_path / str(number), rows) / "metrics.jsonl")))
    assert read[0] == read[1] and "nan" in read[0]


@pytest.mark.parametrize("value", ODD, ids=lambda value: "absent" if value is ABSENT else str(value))
@pytest.mark.parametrize(
    "chosen", [*(pytest.param(name, marks=pytest.mark.weekly) for name in ("timing_s/step", "timing_s/")), ""]
)
def test_any_figure_may_be_odd(tmp_path, monkeypatch, value, chosen):
    """In the last four steps: not measured, out of range, of another type; others are read as these."""
    rows = records()
    for row in rows[3:]:
        for key in [key for key in row["data"] if key.startswith(chosen)]:
            row["data"].pop(key) if value is ABSENT else row["data"].update({key: value})
    monkeypatch.setattr(sys, "argv", ["report", str(write(tmp_path, rows)), "--html"])
    with contextlib.suppress(SystemExit) if not chosen else contextlib.nullcontext():  # its reward is too low
        report.main()
    json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    picture(tmp_path / "report.png")


@pytest.mark.parametrize("name", ["a$b$c", "$\\frac", "_hidden", "x" * 200, "{}%s<&>"])
def test_a_run_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "argv", ["report", str(write(tmp_path / name, records())), "--html"])
    report.main()
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    report_plots.plot(
        [(name, report_figures.read_metrics(tmp_path / name / "metrics.jsonl"))], tmp_path / "x.png"
    )
    labels = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert len(labels) == 2 and all(name in label for label in labels)
