"""CPU time of a rollout server's front end per generated token, at 8192 requests.

Usage:    python bench/bench_front_end.py [--quick]
          STACK=cann9.1 .venv-cann9.1/bin/python bench/bench_front_end.py
What the server of the 235B layout does between its engines and the agent loops: messages of 32 engines with
256 requests each are decoded, vLLM's OutputProcessor takes them, AsyncLLM wakes the callers, verl's generate
makes the result. All of it is verl's and vLLM's own code in one process, with verl's sampling parameters and
log-probs; only the engines are played: vLLM's encoder has encoded their messages before the clock starts. The
last step's results are part of a token's time; starting the requests is printed by itself.
"verl" makes verl's own request (text, an output a token), "here" what this project's server asks for; both
have our change of vLLM, and both must return the same. Bar: 8 us per token. Needs data/tiny (made by
quickstart.sh).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from pathlib import Path

from bars import bar, finish, parser_of, tiny_model

ENGINES, SEATS, BAR_US = 32, 256, 8.0


def main() -> int:
    parser = parser_of(__doc__, "once, 16 tokens")
    parser.add_argument("--tokens", type=int, default=48, help="of a response (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of each, alternating; medians are printed")
    parser.add_argument("--model", type=Path, help="for its tokenizer (data/tiny/model)")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if arguments.quick:
        arguments.tokens, arguments.repeats = 16, 1

    from played_engines import Server

    model = arguments.model or tiny_model()
    ways, taken, results = ("verl", "here"), {}, {}
    for _ in range(arguments.repeats):
        for way in ways:
            server = Server(model, ENGINES, SEATS, plain=way == "verl")
            messages = server.messages(arguments.tokens)

            async def rollout(server=server, messages=messages):
                calls = await server.start()
                began, ended = time.process_time(), None
                await server.play(messages)
                ended = time.process_time()
                return await asyncio.gather(*calls), ended - began

            began = time.process_time()
            found, playing = asyncio.run(rollout())
            whole = time.process_time() - began
            each = 1e6 / (len(found) * arguments.tokens)
            taken.setdefault(way, []).append((playing * each, (whole - playing) * 1e6 / len(found)))
            results.setdefault(way, [(o.token_ids, o.log_probs, o.stop_reason) for o in found])
    assert results["verl"] == results["here"], "the two ways return different results"
    rows = {way: [statistics.median(column) for column in zip(*taken[way], strict=True)] for way in ways}
    print(f"{ENGINES} engines x {SEATS} requests, {arguments.tokens} tokens each, CPU time")
    print(f"{'':<6} {'us/token':>9} {'us/request (start, end)':>27}")
    for way, (token, request) in rows.items():
        print(f"{way:<6} {token:>9.2f} {request:>27.0f}")
    value = rows["here"][0]
    return finish("front_end", [bar("front end", value, "us/token", f"<= {BAR_US:g}")], rows=rows)


if __name__ == "__main__":
    sys.exit(main())
