"""The front end of a rollout server: how many requests it lets in.

verl's server is one Ray actor, however many DP engines it deals to: with DP32 x TP4 one actor takes a step's
8192 requests. verl lets in max(1000, max_num_seqs + 16) calls at a time, which is the number of one engine:
31 requests an engine where 256 fit. The others wait in Ray, where no engine, no mover and no abort sees them;
and so do calls that are no requests (progress, what a server holds, pause), behind all of them.

Idea: Ray does not hold requests back. vLLM's scheduler already admits max_num_seqs per engine and queues the
rest in order. Invariant (tests/patched/test_rollout_concurrency.py): all requests of a step are in the server
at once, and a question is answered meanwhile. Cost: none beyond what a call takes in Ray anyway.
"""

from __future__ import annotations

# Calls that Ray runs at a time in a server: more than any step has requests, those queued in vLLM included.
CALLS_AT_ONCE = 1 << 20
