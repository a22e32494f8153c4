"""How long verl's agent loop takes to send a rollout's requests, with one instance for all and with one each.

    python bench/bench_agent_loop.py [--requests 1024]

One worker of verl, with the real tokenizer, agent loop and load balancer; its server answers at once with 8
tokens. Prints when the last request of a batch reaches the server and when the batch is complete, and writes
bench/results/agent_loop.json.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from pathlib import Path

from bars import bar, finish, parser_of, tiny_model


def main() -> int:
    parser = parser_of(__doc__, "once, 64 requests")
    parser.add_argument(
        "--requests", type=int, default=1024, help="of one worker; 235B: 8192 over 8 (default %(default)s)"
    )
    parser.add_argument("--model", type=Path, help="for its tokenizer (data/tiny/model)")
    parser.add_argument("--repeats", type=int, default=5, help="of each; medians are printed")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.repeats = 64, 1

    import numpy as np
    import torch
    from counting_servers import make_manager, remote

    from verl import DataProto
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.workers.rollout.replica import TokenOutput

    class Server:
        last = 0.0

        async def generate(self, **kwargs):
            self.last = time.perf_counter()
            return TokenOutput(token_ids=[5] * 8, num_preempted=0)

    server, worker = Server(), make_manager(arguments.model or tiny_model()).workers[0]
    ids = worker.server_manager._server_id_to_handle
    worker.server_manager._server_id_to_handle = dict.fromkeys(ids, remote(server))
    messages = np.empty(arguments.requests, dtype=object)
    messages[:] = [
        [{"role": "user", "content": f"{i % 90 + 10}+{i // 90 % 90}"}] for i in range(len(messages))
    ]

    def rollout() -> tuple[float, float]:
        """Seconds until the last request was sent, and until the batch was complete."""
        batch = DataProto.from_dict(
            tensors={"unused": torch.zeros(len(messages), 1)}, non_tensors={"raw_prompt": messages}
        )
        started = time.perf_counter()
        assert len(asyncio.run(worker.generate_sequences(batch))) == len(messages)
        return server.last - started, time.perf_counter() - started

    rows = {"one instance per request": False, "one instance per worker": True}
    taken = {name: [] for name in rows}
    rollout()
    for _ in range(arguments.repeats):
        for name, stateless in rows.items():
            SingleTurnAgentLoop.stateless = stateless
            taken[name].append(rollout())
    found = {
        name: dict(
            zip(("sent_s", "complete_s"), map(statistics.median, zip(*times, strict=True)), strict=True)
        )
        for name, times in taken.items()
    }
    print(f"{arguments.requests} requests of one worker, median of {arguments.repeats}")
    print(f"{'':<24} {'last sent s':>11} {'complete s':>10} {'ms/request':>10}")
    for name, row in found.items():
        each = 1000 * row["complete_s"] / arguments.requests
        print(f"{name:<24} {row['sent_s']:>11.2f} {row['complete_s']:>10.2f} {each:>10.2f}")
    share = found["one instance per worker"]["sent_s"] / found["one instance per request"]["sent_s"]
    bars = [bar("last request sent, one instance per worker / one per request", share, "", "< 1")]
    return finish("agent_loop", bars, requests=arguments.requests, rows=found)


if __name__ == "__main__":
    sys.exit(main())
