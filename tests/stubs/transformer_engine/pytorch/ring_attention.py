"""Causal ring attention over packed sequences, forward and backward, by sends and receives."""

from __future__ import annotations

import torch
import torch.distributed as dist


def places(bounds: list[int], size: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which sequence each token of ``rank`` is of, and its position there: [tokens], [tokens]."""
    sequences, positions = [], []
    for i, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        chunk = (end - begin) // (2 * size)
        positions += [torch.arange(chunk) + at * chunk for at in (rank, 2 * size - 1 - rank)]
        sequences.append(torch.full((2 * chunk,), i))
    return torch.cat(sequences), torch.cat(positions)


def passed_on(tensor: torch.Tensor, group) -> torch.Tensor:
    """What the rank before in the ring has; the rank after gets ``tensor``."""
    size, rank, received = dist.get_world_size(group), dist.get_rank(group), torch.empty_like(tensor)
    pending = [
        dist.isend(tensor, group=group, group_dst=(rank + 1) % size),
        dist.irecv(received, group=group, group_src=(rank - 1) % size),
    ]
    for work in pending:
        work.wait()
    return received


def heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[tokens, groups, channels] -> [heads, tokens, channels]"""
    return x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)


class RingAttention(torch.autograd.Function):
    """Arguments and result as those of `attention.packed_attention`."""

    @staticmethod
    def scores(query, key, bounds, scale, size, rank, holder):
        """[heads, tokens, tokens of ``holder``], -inf for later tokens and other sequences."""
        sequence, position = places(bounds, size, rank)
        key_sequence, key_position = places(bounds, size, holder)
        seen = (sequence[:, None] == key_sequence) & (position[:, None] >= key_position)
        heads = query.shape[1]
        product = query.transpose(0, 1) @ heads_first(key, heads).transpose(1, 2) * scale
        return product.masked_fill(~seen, -torch.inf)

    @staticmethod
    def forward(ctx, query, key, value, bounds, scale, group):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        heads, held = query.shape[1], torch.stack([key, value])
        for step in range(size):  # the first are the rank's own, of which every token sees at least itself
            scores = RingAttention.scores(query, held[0], bounds, scale, size, rank, (rank - step) % size)
            totals = scores.logsumexp(-1, keepdim=True)
            part = (scores - totals.clamp(min=-1e30)).exp() @ heads_first(held[1], heads)
            if step == 0:
                out, total = part, totals
            else:
                both = torch.logaddexp(total, totals)
                out, total = out * (total - both).exp() + part * (totals - both).exp(), both
            if step + 1 < size:
                held = passed_on(held, group)
        ctx.save_for_backward(query, key, value, out, total)
        ctx.rest = bounds, scale, group
        return out.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, out, total = ctx.saved_tensors
        bounds, scale, group = ctx.rest
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        heads, groups = query.shape[1], key.shape[1]
        gradient, by_query = gradient.transpose(0, 1), torch.zeros_like(out)
        weight = (gradient * out).sum(-1, keepdim=True)
        held = torch.stack([key, value, torch.zeros_like(key), torch.zeros_like(value)])

        def of_groups(x):  # [heads, tokens, channels] -> [tokens, groups, channels]
            return x.transpose(0, 1).unflatten(1, (groups, heads // groups)).sum(2)

        for step in range(size):
            scores = RingAttention.scores(query, held[0], bounds, scale, size, rank, (rank - step) % size)
            share = (scores - total).exp()
            by_score = share * (gradient @ heads_first(held[1], heads).transpose(1, 2) - weight) * scale
            by_query += by_score @ heads_first(held[0], heads)
            held[2] += of_groups(by_score.transpose(1, 2) @ query.transpose(0, 1))
            held[3] += of_groups(share.transpose(1, 2) @ gradient)
            held = passed_on(held if step + 1 < size else held[2:].contiguous(), group)
        return by_query.transpose(0, 1), held[0], held[1], None, None, None
