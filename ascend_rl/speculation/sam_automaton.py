"""Suffix automatons in one array of integers, and drafts from them: the compiled part of `sam`.

The functions without an underscore are what `SamDrafter` calls.
"""

from __future__ import annotations

import numpy as np
from numba import njit, types

# All structures live in one int32 array; a pointer is an index into it, 0 means none. Chunks are its pages.
CHUNK = 4096
FREE, UNUSED, USED, LIMIT, TABLE, SHARING, CHUNK_LINKS = range(7)
SPARE_CHUNKS = 4096  # mapped beyond the limit, which is checked before a token is taken in, not during it

# A state: length of its longest suffix, suffix link, the token that last followed and where it leads, all
# edges if there is more than one, and whether that token also followed the time before (-1: seen only once).
STATE = 6
LENGTH, LINK, TOKEN, TO, EDGES, AGAIN = range(STATE)

# Edges of a state: log2 of the places, count, then (token, state) by hash. If log2 is 0: FANOUT such blocks.
LARGEST, FANOUT_BITS = 9, 6
FANOUT = 1 << FANOUT_BITS

# A text: its group, the state of all its tokens so far (they are one path), their number, the last RING.
GROUP, AT, SEEN, LATEST, RING = 0, 1, 2, 3, 8
TEXT = LATEST + RING

# A group: what it owns, the text of its prompt, and the token being taken in, if a call ended in the middle.
(ROOT, STATES, STATES_END, BLOCKS, BLOCKS_END, LAST_OWNED, FIRST_OWNED, OWNED, PROMPT, PROMPT_TOKENS, PHASE,
 WHOSE, INPUT, NEW, P, Q, CLONE, FREE_BLOCKS) = range(18)  # fmt: skip
GROUP_RECORD = FREE_BLOCKS + LARGEST + 1
IDLE, ADDING, REDIRECTING = range(3)

# BUDGET: steps of one call, about 0.1 us each. LEARNING: suffixes of a text that learn its next token.
# STARTS: suffixes that a draft may start from; they are compared over LOOKAHEAD tokens.
BUDGET, LEARNING, STARTS, LOOKAHEAD = 16384, 32, 12, 6
# Odds: 16 classes of suffix length, then the table's contexts by length; each without and with AGAIN.
LENGTH_CLASSES, RATE = 16, 1 / 64
ORDERS, PLACES = 5, 1 << 21
SEED = np.uint64(0x243F6A8885A308D3)  # any number that is not a token
REPLACED, FULL, NEGATIVE = -1, -2, -3
# The fewest tokens in a prompt that longer prompts may join; a shared start token would unite all requests.
SHORTEST_SHARED = 8

# Types of the compiled functions, so that there is one version of each, whatever is passed.
MEM, ODDS, TEXTS = types.int32[::1], types.float64[::1], (types.int32[::1], types.int64[::1])
INT, HASH, REAL, NONE = types.int64, types.uint64, types.float64, types.void
DRAFTED, PROPOSED = types.Tuple((INT, REAL)), types.UniTuple(INT, 2)


@njit(NONE(MEM, INT, INT, INT), cache=True)
def _fill(mem, at, ints, value):
    for i in range(at, at + ints):
        mem[i] = value


@njit(NONE(MEM, INT, INT, INT), cache=True)
def _copy(mem, to, at, ints):
    for i in range(ints):
        mem[to + i] = mem[at + i]


@njit(INT(MEM, INT), cache=True)
def _take_chunk(mem, group):
    chunk = mem[FREE]
    if chunk:
        mem[FREE] = mem[CHUNK_LINKS + chunk]
    else:
        chunk = mem[UNUSED]
        mem[UNUSED] += 1
    mem[USED] += 1
    if group:
        mem[CHUNK_LINKS + chunk] = mem[group + FIRST_OWNED]
        mem[group + FIRST_OWNED] = chunk
        mem[group + OWNED] += 1
    return chunk * CHUNK


@njit(INT(MEM, INT, INT), cache=True)
def _allot(mem, group, ints):
    at = mem[group + STATES]
    if at + ints > mem[group + STATES_END]:
        at = _take_chunk(mem, group)
        mem[group + STATES_END] = at + CHUNK
    mem[group + STATES] = at + ints
    return at


@njit(INT(MEM, INT, INT), cache=True)
def _new_state(mem, group, length):
    state = _allot(mem, group, STATE)
    mem[state + LENGTH] = length
    mem[state + LINK] = mem[state + TO] = mem[state + EDGES] = 0
    mem[state + TOKEN] = mem[state + AGAIN] = -1
    return state


@njit(INT(MEM, INT), cache=True)
def new_text(mem, group):
    text = _allot(mem, group, TEXT)
    mem[text + GROUP] = group
    mem[text + AT] = mem[group + ROOT]
    mem[text + SEEN] = -1  # not even the prompt has been seen
    return text


@njit(INT(MEM, INT), cache=True)
def new_group(mem, prompt_tokens):
    group = _take_chunk(mem, 0)
    _fill(mem, group, GROUP_RECORD, 0)
    chunk = group // CHUNK
    mem[CHUNK_LINKS + chunk] = 0
    mem[group + FIRST_OWNED] = mem[group + LAST_OWNED] = chunk
    mem[group + OWNED] = 1
    mem[group + STATES] = group + GROUP_RECORD
    mem[group + STATES_END] = group + CHUNK
    mem[group + ROOT] = _new_state(mem, group, 0)
    mem[group + PROMPT_TOKENS] = prompt_tokens
    mem[group + PROMPT] = new_text(mem, group)
    mem[mem[group + PROMPT] + SEEN] = 0
    return group


@njit(NONE(MEM, INT), cache=True)
def free_group(mem, group):
    mem[CHUNK_LINKS + mem[group + LAST_OWNED]] = mem[FREE]
    mem[FREE] = mem[group + FIRST_OWNED]
    mem[USED] -= mem[group + OWNED]


@njit(INT(INT), cache=True)
def _hash(token):
    hashed = np.uint32(token) * np.uint32(0x9E3779B1)
    return np.int64(hashed ^ (hashed >> np.uint32(15)))


@njit(INT(MEM, INT, INT), cache=True)
def _new_block(mem, group, size):
    ints = 2 + (2 << size if size else FANOUT)
    block = mem[group + FREE_BLOCKS + size]
    if block:
        mem[group + FREE_BLOCKS + size] = mem[block + 1]
    else:
        block = mem[group + BLOCKS]
        if block + ints > mem[group + BLOCKS_END]:
            block = _take_chunk(mem, group)
            mem[group + BLOCKS_END] = block + CHUNK
        mem[group + BLOCKS] = block + ints
    mem[block] = size
    _fill(mem, block + 1, ints - 1, -1 if size else 0)
    mem[block + 1] = 0
    return block


@njit(NONE(MEM, INT, INT, INT, INT), cache=True)
def _put(mem, block, hashed, token, to):
    mask = (1 << mem[block]) - 1
    place = hashed & mask
    while mem[block + 2 + 2 * place] >= 0:
        place = (place + 1) & mask
    mem[block + 2 + 2 * place] = token
    mem[block + 3 + 2 * place] = to
    mem[block + 1] += 1


@njit(INT(MEM, INT, INT, INT), cache=True)
def _roomy(mem, group, block, shift):
    """The block, or if it is full, one of twice its size with its edges."""
    size, count = mem[block], mem[block + 1]
    if count < (1 << size if size <= 3 else 3 << size >> 2):
        return block
    larger = _new_block(mem, group, size + 1)
    for edge in range(block + 2, block + 2 + (2 << size), 2):
        if mem[edge] >= 0:
            _put(mem, larger, _hash(mem[edge]) >> shift, mem[edge], mem[edge + 1])
    mem[block + 1] = mem[group + FREE_BLOCKS + size]
    mem[group + FREE_BLOCKS + size] = block
    return larger


@njit(NONE(MEM, INT, INT, INT, INT), cache=True)
def _insert(mem, group, state, token, to):
    """Add an edge that the state's block does not have yet."""
    where, hashed, shift = state + EDGES, _hash(token), 0
    if mem[where] == 0:
        mem[where] = _new_block(mem, group, 1)
    while True:
        block = mem[where]
        if mem[block] == LARGEST and mem[block + 1] == 3 << LARGEST >> 2:
            directory = _new_block(mem, group, 0)
            for edge in range(block + 2, block + 2 + (2 << LARGEST), 2):
                if mem[edge] >= 0:
                    rest = _hash(mem[edge]) >> shift
                    child = directory + 2 + (rest & (FANOUT - 1))
                    if mem[child] == 0:
                        mem[child] = _new_block(mem, group, 3)
                    mem[child] = _roomy(mem, group, mem[child], shift + FANOUT_BITS)
                    _put(mem, mem[child], rest >> FANOUT_BITS, mem[edge], mem[edge + 1])
            mem[block + 1] = mem[group + FREE_BLOCKS + LARGEST]
            mem[group + FREE_BLOCKS + LARGEST] = block
            mem[where] = block = directory
        if mem[block]:
            break
        where = block + 2 + (hashed >> shift & (FANOUT - 1))
        shift += FANOUT_BITS
        if mem[where] == 0:
            mem[where] = _new_block(mem, group, 3)
    mem[where] = _roomy(mem, group, block, shift)
    _put(mem, mem[where], hashed >> shift, token, to)


@njit(INT(MEM, INT, INT), cache=True)
def _edge(mem, state, token):
    """Index of the edge in the state's block, 0 if there is none."""
    block, hashed = mem[state + EDGES], _hash(token)
    while block and mem[block] == 0:
        block = mem[block + 2 + (hashed & (FANOUT - 1))]
        hashed >>= FANOUT_BITS
    if block:
        mask = (1 << mem[block]) - 1
        for i in range(mask + 1):
            edge = block + 2 + 2 * ((hashed + i) & mask)
            if mem[edge] == token:
                return edge
            if mem[edge] < 0:
                break
    return 0


@njit(INT(MEM, INT, INT), cache=True)
def _next(mem, state, token):
    """The state that an edge leads to, 0 if there is none."""
    if mem[state + TOKEN] == token:
        return mem[state + TO]
    edge = _edge(mem, state, token)
    return mem[edge + 1] if edge else 0


@njit(INT(MEM, INT, INT), cache=True)
def _copy_block(mem, group, block):
    copy = _new_block(mem, group, mem[block])
    _copy(mem, copy, block, 2 + (2 << mem[block] if mem[block] else FANOUT))
    return copy


@njit(NONE(MEM, INT, INT), cache=True)
def _own_edges(mem, group, state):
    """Copy the block that a state still shares with another; a directory with all blocks below it."""
    copy = mem[state + EDGES] = _copy_block(mem, group, mem[state + EDGES])
    directory = 0 if mem[copy] else copy
    while directory:  # a stack, linked through each one's second int
        below = mem[directory + 1]
        for child in range(directory + 2, directory + 2 + FANOUT):
            if mem[child]:
                copy = mem[child] = _copy_block(mem, group, mem[child])
                if mem[copy] == 0:
                    mem[copy + 1] = below
                    below = copy
        directory = below


@njit(INT(MEM, INT, INT, INT), cache=True)
def _begin_clone(mem, group, p, q):
    """Give the suffixes of q that also end p's edge to it a new state, apart from the longer ones."""
    clone = _new_state(mem, group, mem[p + LENGTH] + 1)
    _copy(mem, clone + LINK, q + LINK, STATE - LINK)
    if mem[q + EDGES]:
        _own_edges(mem, group, clone)
    mem[q + LINK] = clone
    mem[group + PHASE], mem[group + P], mem[group + Q], mem[group + CLONE] = REDIRECTING, p, q, clone
    return clone


@njit(INT(MEM, INT, INT), cache=True)
def _extend(mem, group, budget):
    """Continue until the token is in or the budget is spent; returns the rest of the budget."""
    p, token = mem[group + P], mem[group + INPUT]
    if mem[group + PHASE] == ADDING:
        new = mem[group + NEW]
        while p and budget > 0 and _next(mem, p, token) == 0:
            if mem[p + TOKEN] < 0:
                mem[p + TOKEN], mem[p + TO] = token, new
            else:
                if mem[p + EDGES] == 0:
                    _insert(mem, group, p, mem[p + TOKEN], mem[p + TO])
                _insert(mem, group, p, token, new)
            p = mem[p + LINK]
            budget -= 2
        mem[group + P] = p
        if budget <= 0:
            return budget
        mem[group + PHASE] = IDLE
        if p == 0:
            mem[new + LINK] = mem[group + ROOT]
        else:
            q = _next(mem, p, token)
            if mem[q + LENGTH] == mem[p + LENGTH] + 1:
                mem[new + LINK] = q
            else:
                mem[new + LINK] = _begin_clone(mem, group, p, q)
    if mem[group + PHASE] == REDIRECTING:
        q, clone = mem[group + Q], mem[group + CLONE]
        while p and budget > 0 and _next(mem, p, token) == q:
            if mem[p + TOKEN] == token:
                mem[p + TO] = clone
            if mem[p + EDGES]:
                mem[_edge(mem, p, token) + 1] = clone
            p = mem[p + LINK]
            budget -= 2
        mem[group + P] = p
        if budget > 0:
            mem[group + PHASE] = IDLE
    return budget


@njit(INT(INT), cache=True)
def _length_class(length):
    return length if length < 8 else min(LENGTH_CLASSES - 1, 6 + length // 4)


@njit(INT(MEM, ODDS, INT, INT, INT), cache=True)
def _learn(mem, odds, group, state, token):
    """Teach suffixes of a text what followed, and odds whether that was expected. Returns the steps."""
    steps, root = 0, mem[group + ROOT]
    while state != root and steps < LEARNING:
        again = mem[state + AGAIN]
        expected = mem[state + TOKEN] == token
        if again < 0:
            mem[state + AGAIN] = 0
        else:
            kind = 2 * _length_class(mem[state + LENGTH]) + again
            odds[kind] += (expected - odds[kind]) * RATE
            mem[state + AGAIN] = expected
            if not expected and not again:
                mem[state + TO] = mem[_edge(mem, state, token) + 1]
                mem[state + TOKEN] = token
        state = mem[state + LINK]
        steps += 1
    return steps


@njit(HASH(HASH, INT), cache=True)
def _mix(hashed, token):
    hashed = (hashed ^ np.uint64(token)) * np.uint64(0x9E3779B97F4A7C15)
    return hashed ^ (hashed >> np.uint64(32))


@njit(types.UniTuple(INT, 2)(MEM, HASH), cache=True)
def _entry(mem, hashed):
    """The place in the table for tokens with this hash, and the mark that shows an entry is theirs."""
    place = mem[TABLE] + 2 * np.int64(hashed & np.uint64(PLACES - 1))
    return place, np.int64(hashed >> np.uint64(34)) << 1


@njit(INT(MEM, INT, INT), cache=True)
def _recent(mem, text, back):
    return np.int64(mem[text + LATEST + (mem[text + SEEN] - back) % RING])


@njit(NONE(MEM, ODDS, HASH, INT, INT), cache=True)
def _learn_entry(mem, odds, hashed, order, token):
    place, mark = _entry(mem, hashed)
    if mem[place] & ~1 != mark or mem[place + 1] == 0:
        mem[place], mem[place + 1] = mark, token + 1
        return
    again, expected = mem[place] & 1, mem[place + 1] == token + 1
    kind = 2 * (LENGTH_CLASSES + order) + again
    odds[kind] += (expected - odds[kind]) * RATE
    mem[place] = mark | expected
    if not expected and not again:
        mem[place + 1] = token + 1


@njit(INT(MEM, ODDS, INT), cache=True)
def _take_in(mem, odds, group):
    """Learn from a token that the automaton now has, and advance its text. Returns the steps."""
    text, token = mem[group + WHOSE], np.int64(mem[group + INPUT])
    steps = _learn(mem, odds, group, mem[text + AT], token)
    seen = mem[text + SEEN]
    if mem[SHARING]:
        hashed = SEED
        for order in range(1, min(seen, ORDERS) + 1):
            hashed = _mix(hashed, _recent(mem, text, order))
            _learn_entry(mem, odds, hashed, order, token)
    mem[text + LATEST + seen % RING] = token
    mem[text + SEEN] = seen + 1
    mem[text + AT] = mem[group + NEW]
    return steps + 4


@njit(NONE(MEM, INT, INT, INT), cache=True)
def _begin(mem, group, text, token):
    """Start to take a token of a text into the automaton."""
    at = mem[text + AT]
    mem[group + WHOSE], mem[group + INPUT] = text, token
    q = _next(mem, at, token)
    if q == 0:
        mem[group + NEW] = _new_state(mem, group, mem[at + LENGTH] + 1)
        mem[group + PHASE], mem[group + P] = ADDING, at
    elif mem[q + LENGTH] == mem[at + LENGTH] + 1:
        mem[group + NEW] = q
        mem[group + PHASE], mem[group + P] = REDIRECTING, 0
    else:
        mem[group + NEW] = _begin_clone(mem, group, at, q)


@njit(REAL(MEM, ODDS, INT, INT, INT), cache=True)
def _path_odds(mem, odds, start, state, i):
    return odds[2 * _length_class(mem[start + LENGTH] + i) + max(mem[state + AGAIN], 0)]


@njit(INT(MEM, ODDS, INT, INT), cache=True)
def _best_suffix(mem, odds, text, k):
    """The suffix of a text whose draft is expected to get the most tokens right; 0: none."""
    root = mem[mem[text + GROUP] + ROOT]
    start, best, tries = 0, 0.0, 0
    state = mem[text + AT]
    while state != root and tries < STARTS:
        if mem[state + TOKEN] >= 0:
            at, chance, value = state, 1.0, 0.0
            for i in range(min(k, LOOKAHEAD)):
                if mem[at + TOKEN] < 0:
                    break
                chance *= _path_odds(mem, odds, state, at, i)
                value += chance
                at = mem[at + TO]
            if value > best:
                start, best = state, value
            tries += 1
        state = mem[state + LINK]
    return start


@njit(DRAFTED(MEM, ODDS, INT, MEM, ODDS, INT, REAL), cache=True)
def _follow(mem, odds, start, out, chances, k, worth):
    """Draft into out[:k] what last followed a suffix, and into chances[:k] how likely it is right so far.

    Returns the number drafted and that expected right.
    """
    drafted, value, at, chance = 0, 0.0, start, 1.0
    while drafted < k and mem[at + TOKEN] >= 0:
        chance *= _path_odds(mem, odds, start, at, drafted)
        if chance < worth:
            break
        out[drafted], chances[drafted] = mem[at + TOKEN], chance
        value += chance
        drafted += 1
        at = mem[at + TO]
    return drafted, value


@njit(DRAFTED(MEM, ODDS, INT, MEM, ODDS, INT, REAL), cache=True)
def _follow_table(mem, odds, text, out, chances, k, worth):
    """The same into out[k:] and chances[k:], from the table's entries for the last tokens, drafted or not."""
    drafted, value, chance = 0, 0.0, 1.0
    while drafted < k:
        guess, likely, hashed = 0, 0.0, SEED
        for order in range(1, min(mem[text + SEEN], ORDERS) + 1):
            before = out[k + drafted - order] if order <= drafted else _recent(mem, text, order - drafted)
            hashed = _mix(hashed, before)
            place, mark = _entry(mem, hashed)
            if mem[place] & ~1 == mark and mem[place + 1]:
                kind = 2 * (LENGTH_CLASSES + order) + (mem[place] & 1)
                if odds[kind] > likely:
                    guess, likely = mem[place + 1], odds[kind]
        chance *= likely
        if guess == 0 or chance < worth:
            break
        out[k + drafted], chances[k + drafted] = guess - 1, chance
        value += chance
        drafted += 1
    return drafted, value


@njit(INT(MEM, ODDS, INT, MEM, ODDS, INT, REAL), cache=True)
def _draft(mem, odds, text, out, chances, k, worth):
    """Draft into out[:k] and chances[:k]; the rest is scratch space. Returns the number of tokens."""
    start, drafted, value = _best_suffix(mem, odds, text, k), 0, 0.0
    if start:
        drafted, value = _follow(mem, odds, start, out, chances, k, worth)
    if mem[SHARING]:
        others, their_value = _follow_table(mem, odds, text, out, chances, k, worth)
        if their_value > value:
            _copy(out, 0, k, others)
            chances[:others] = chances[k : k + others]
            drafted = others
    return drafted


@njit([PROPOSED(MEM, ODDS, INT, tokens, MEM, ODDS, INT, REAL, INT) for tokens in TEXTS], cache=True)
def propose(mem, odds, text, tokens, out, chances, k, worth, budget):
    """Take in the new tokens, then draft.

    Returns the number of drafted tokens, or why there are none, and the rest of the budget.
    """
    group, n = mem[text + GROUP], len(tokens)
    if n < mem[text + SEEN]:
        return REPLACED, budget
    for i in range(max(0, mem[text + SEEN] - RING), mem[text + SEEN]):
        if tokens[i] != mem[text + LATEST + i % RING]:
            return REPLACED, budget
    while True:
        if mem[group + PHASE] != IDLE:
            budget = _extend(mem, group, budget)
            if mem[group + PHASE] != IDLE:
                return 0, budget
            budget -= _take_in(mem, odds, group)
        whose = text
        if mem[text + SEEN] < 0:
            prompt = mem[group + PROMPT]
            if mem[prompt + SEEN] < mem[group + PROMPT_TOKENS]:
                whose = prompt
            else:
                _copy(mem, text, prompt, TEXT)
        seen = mem[whose + SEEN]
        if whose == text and seen == n:
            break
        if budget <= 0:
            return 0, budget
        if mem[USED] >= mem[LIMIT]:
            return FULL, budget
        if tokens[seen] < 0:
            return NEGATIVE, budget
        _begin(mem, group, whose, tokens[seen])
    return _draft(mem, odds, text, out, chances, k, worth), budget


@njit([types.int64[::1](tokens) for tokens in TEXTS], cache=True)
def prefix_hashes(tokens):
    hashes, hashed = np.empty(len(tokens), np.int64), SEED
    for i in range(len(tokens)):
        hashed = _mix(hashed, np.int64(tokens[i]))
        hashes[i] = np.int64(hashed >> np.uint64(1))
    return hashes
