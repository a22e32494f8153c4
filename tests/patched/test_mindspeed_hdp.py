"""USE_HDP=1 on MindSpeed's ring attention, if frameworks/mindspeed is present: as in test_enable_hdp.py.

MindSpeed's own communication and its own forward and backward of ring attention run, on software NPUs.
"""

from __future__ import annotations

from pathlib import Path

from megatron_tiny import Layout, make_checkpoint
from mindspeed_tree import MINDSPEED, needs_mindspeed
from ranks import run_ranks
from test_enable_hdp import KL, batch_of_many_lengths, compare, learn
from test_megatron_actor import reference
from test_mindspeed import FLASH, options

pytestmark = needs_mindspeed


def ring(size: int) -> Layout:
    return Layout(cp=size, options=FLASH + options(
        context_parallel_size=size, context_parallel_algo="megatron_cp_algo", attention_mask_type="causal"
    ))  # fmt: skip


RUNS = [[(ring(4), 12)], [(ring(4), None), (ring(2), None), (ring(2), 20)]]


def on_mindspeed(rank: int, path: Path, runs: list[tuple[Layout, int | None]]) -> list[dict]:
    """What was learnt, with the bytes this rank sent in attention's rings."""
    from mindspeed.core.context_parallel.utils import RingP2P

    send, sent, results = RingP2P.async_send_recv, [], []

    def counted(self, tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return send(self, tensor, *args, **kwargs)

    RingP2P.async_send_recv = counted
    for layout, cap in runs:
        sent.clear()
        results.append(learn(layout, path, rank, cap))
        results[-1]["sent"] = sum(sent)
    return results


def test_rings_learn_what_hugging_face_learns(tmp_path):
    path = make_checkpoint("dense", tmp_path / "dense", layers=2)
    expected, sent = reference(path, batch_of_many_lengths(), KL), []
    for runs in RUNS:  # first what fails where MindSpeed knows no rings
        ranks = run_ranks(4, on_mindspeed, path, runs, stubs=(MINDSPEED,), npu=True)
        for number, (layout, cap) in enumerate(runs):
            results = [results[number] for results in ranks]
            compare(results, *expected, f"CP{layout.cp} {cap}")
            sent.append(sum(result["sent"] for result in results))
            print(f"CP{layout.cp} {cap}: {sent[-1]} bytes")
    rings_of_cp4, cp4, cp2, rings_of_cp2 = sent
    assert 0 < rings_of_cp4 < 0.8 * cp4 and 0 < rings_of_cp2 < 0.9 * cp2
