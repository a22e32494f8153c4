"""The suffix automaton against all substrings of the texts, and the drafter's guarantees."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_rl.speculation import sam_automaton as sam
from ascend_rl.speculation.sam import SamDrafter

SMALL = 32 << 20


def texts_of(prompt, outputs):
    return [tuple(prompt + output) for output in outputs]


def feed(drafter, prompt, outputs, order=None, step=1):
    """Requests "0", "1", ... grow by ``step`` tokens in turns. Returns (request, length, draft) of calls."""
    seen, calls = [0] * len(outputs), []
    turns = list(order or []) + [i for i, o in enumerate(outputs) for _ in range(len(o) + 1)]
    for i in turns:
        seen[i] = min(seen[i] + step, len(outputs[i]))
        tokens = np.array(prompt + outputs[i][: seen[i]], dtype=np.int64)
        calls.append((i, len(tokens), drafter.propose(str(i), tokens, len(prompt)).tolist()))
    return calls


def substrings(texts):
    return {t[a:b] for t in texts for a in range(len(t)) for b in range(a + 1, len(t) + 1)}


def walk(memory, group, tokens):
    state = memory[group + sam.ROOT]
    for token in tokens:
        state = sam._next(memory, state, token)
        if state == 0:
            return 0
    return state


def check_automaton(drafter, texts):
    """States are the sets of prefixes that the same substrings end, and their links and edges are right."""
    memory, (group,) = drafter._memory, drafter._groups.values()
    prefixes = {t[:n] for t in texts for n in range(len(t) + 1)}
    ends = {x: frozenset(p for p in prefixes if p[len(p) - len(x) :] == x) for x in substrings(texts) | {()}}
    states = {x: walk(memory, group, x) for x in ends}
    assert all(states.values())
    assert (
        len(set(states.values()))
        == len(set(ends.values()))
        == len(set(zip(states.values(), ends.values(), strict=True)))
    )
    longest = {}
    for x, state in states.items():
        longest[state] = max(longest.get(state, ()), x, key=len)
    tokens = {t for text in texts for t in text} | {99}
    for state, x in longest.items():
        assert memory[state + sam.LENGTH] == len(x)
        shorter = next((x[i:] for i in range(1, len(x) + 1) if ends[x[i:]] != ends[x]), None)
        assert memory[state + sam.LINK] == (0 if shorter is None else states[shorter])
        for token in tokens:
            assert sam._next(memory, state, token) == states.get((*x, token), 0)


def follows(texts, context, draft):
    """Whether a suffix and the draft are in the texts, or each drafted token and the one before are."""
    known = substrings(texts)
    if any((*context[-n:], *draft) in known for n in range(1, len(context) + 1)):
        return True
    whole = (*context, *draft)
    return all(whole[i - 1 : i + 1] in known for i in range(len(context), len(whole)))


SMALL_TEXTS = dict(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=5),
    outputs=st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=3),
    order=st.lists(st.integers(0, 100), max_size=20),
    step=st.integers(1, 4),
)


@settings(max_examples=60)
@given(**SMALL_TEXTS)
def test_interleaved_texts_give_the_automaton_of_all_substrings_and_real_continuations(
    prompt, outputs, order, step
):
    drafter = SamDrafter(4, max_bytes=SMALL)
    calls = feed(drafter, prompt, outputs, [i % len(outputs) for i in order], step)
    texts = texts_of(prompt, outputs)
    check_automaton(drafter, texts)
    for i, length, draft in calls:
        assert len(draft) <= 4
        assert not draft or follows(texts, texts[i][:length], draft)
    for i, text in enumerate(texts):
        assert drafter._memory[drafter._texts[str(i)] + sam.AT] == walk(
            drafter._memory, *drafter._groups.values(), text
        )


@settings(max_examples=15)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=300), st.data())
def test_catching_up_is_the_same_as_token_by_token(tokens, data):
    steady, late = SamDrafter(3, max_bytes=SMALL), SamDrafter(3, max_bytes=SMALL)
    tokens = np.array(tokens)
    for n in range(1, len(tokens) + 1):
        last = steady.propose("r", tokens[:n], 1)
    off = data.draw(st.integers(1, len(tokens)))
    late.propose("r", tokens[:off], 1)
    assert late.propose("r", tokens, 1).tolist() == last.tolist()
    assert np.array_equal(steady._memory, late._memory) and np.array_equal(steady._odds, late._odds)


def settle(drafter, request, tokens, prompt_tokens, calls=200):
    """Call until all tokens are taken in. Returns the number of calls it took."""
    for call in range(calls):
        drafter.propose(request, tokens, prompt_tokens)
        if drafter._memory[drafter._texts[request] + sam.SEEN] == len(tokens):
            return call + 1
    raise AssertionError("never taken in")


def test_the_shorter_suffixes_inherit_what_followed():
    """2 always came after 1, until now: the state of "2" alone begins with what that of "1 2" knows."""
    tokens = np.array([1, 2, 9] * 3 + [2])
    drafter = SamDrafter(3, share_groups=False, max_bytes=SMALL)
    draft = drafter.propose("a", tokens, 1)
    memory, (group,) = drafter._memory, drafter._groups.values()
    old, new = walk(memory, group, (1, 2)), walk(memory, group, (2,))
    assert memory[old + sam.LINK] == new and memory[new + sam.LENGTH] == 1
    known = [memory[state + np.array([sam.TOKEN, sam.TO, sam.AGAIN])].tolist() for state in (old, new)]
    assert known[0] == known[1] == [9, walk(memory, group, (1, 2, 9)), 1]
    assert draft.tolist() == [9, 1, 2]


def test_what_a_state_inherits_it_keeps_by_itself():
    """Edges are copied, not shared: what follows "2" elsewhere does not follow "1 2"."""
    drafter = SamDrafter(3, share_groups=False, max_bytes=SMALL)
    drafter.propose("a", np.array([1, 2, 9, 1, 2, 8, 1, 2, 6, 2, 7]), 1)
    memory, (group,) = drafter._memory, drafter._groups.values()
    follows = {
        suffix: {t for t in range(10) if sam._next(memory, walk(memory, group, suffix), t)}
        for suffix in ((1, 2), (2,))
    }
    assert follows == {(1, 2): {6, 8, 9}, (2,): {6, 7, 8, 9}}


def test_a_request_begins_where_the_prompt_of_its_group_ends():
    prompt = np.arange(20) % 6
    drafter = SamDrafter(3, max_bytes=SMALL)
    drafter.propose("a", np.append(prompt, [7, 7, 7]), 20)
    drafter.propose("b", prompt, 20)
    (group,) = drafter._groups.values()
    first = drafter._memory[group + sam.PROMPT]
    text, own = (drafter._memory[at : at + sam.TEXT].tolist() for at in (first, drafter._texts["b"]))
    assert own == text and own[sam.SEEN] == 20
    assert sorted(own[sam.LATEST :]) == sorted((prompt[-sam.RING :]).tolist())


def test_leaving_a_long_loop_takes_several_calls_but_gives_the_same_automaton():
    length = 12_000
    tokens = np.array([5] * length + [6] + [5] * length + [7])
    drafter = SamDrafter(4, max_bytes=SMALL)
    settle(drafter, "a", tokens[:length], 1)
    state = drafter._memory[drafter._texts["a"] + sam.AT]
    assert drafter.propose("a", tokens[: length + 1], 1).tolist() == []
    # A sibling that comes in the middle of it ends it first.
    settle(drafter, "b", tokens[:2], 1)
    assert drafter._memory[drafter._texts["a"] + sam.SEEN] == length + 1
    settle(drafter, "a", tokens, 1)
    (group,) = drafter._groups.values()
    for n in (1, 2, 5_000, length):
        state = walk(drafter._memory, group, [5] * n)
        assert drafter._memory[state + sam.LENGTH] == n
        assert {t for t in range(4, 9) if sam._next(drafter._memory, state, t)} == (
            {5, 6, 7} if n < length else {6, 7}
        )
        assert drafter._memory[walk(drafter._memory, group, [5] * n + [7]) + sam.LENGTH] == 2 * length + 2
    assert walk(drafter._memory, group, [6, 5, 6]) == 0


def test_a_state_keeps_any_number_of_continuations():
    rng = np.random.default_rng(0)
    others = rng.permutation(150_000)[:40_000] + 1
    others[:2_000] = np.arange(2_000) << 15  # low bits that are all alike
    tokens = np.zeros(2 * len(others), dtype=np.int32)
    tokens[1::2] = others
    drafter = SamDrafter(2, max_bytes=SMALL)
    settle(drafter, "a", tokens, 1)
    (group,) = drafter._groups.values()
    zero = walk(drafter._memory, group, [0])
    known = set(others.tolist())
    assert all((sam._next(drafter._memory, zero, t) != 0) == (t in known) for t in range(0, 200_000, 7))
    assert all(sam._next(drafter._memory, zero, t) for t in others.tolist())
    # The one before the last 0 makes two states of all those that 0 led to.
    settle(drafter, "a", np.append(tokens, [0, 200_001, 0, 0]), 1)
    states = [walk(drafter._memory, group, suffix) for suffix in ([0], [200_001, 0])]
    assert states[0] != states[1]
    assert all(sam._next(drafter._memory, states[0], t) for t in [*others.tolist(), 200_001])
    assert sam._next(drafter._memory, states[1], 0) and not sam._next(drafter._memory, states[1], 200_001)


def test_bytes_per_token():
    rng = np.random.default_rng(1)
    words = [rng.integers(0, 3_000, n) for n in rng.integers(1, 9, 2_000)]
    text = np.concatenate([words[i] for i in np.minimum(rng.zipf(1.3, 9_000) - 1, 1_999)])[:30_000]
    for tokens in (text, rng.integers(0, 2, 30_000), rng.integers(0, 50_000, 30_000)):
        drafter = SamDrafter(4)
        settle(drafter, "a", tokens, 1)
        assert drafter.used_bytes <= 100 * len(tokens)


def test_repeated_text_is_drafted_in_full_and_random_text_not_at_all():
    rng = np.random.default_rng(2)
    drafter = SamDrafter(6)
    loop = np.tile(rng.integers(0, 1_000, 50), 20)
    drafts = [drafter.propose("a", loop[:n], 10) for n in range(10, 1_000)]
    assert all(
        d.tolist() == loop[n : n + 6].tolist() for n, d in zip(range(200, 990), drafts[190:], strict=False)
    )
    for vocabulary in (1_000, 50_000):
        drafter, noise = SamDrafter(6), rng.integers(0, vocabulary, 4_000)
        drafted = sum(len(drafter.propose("b", noise[:n], 10)) for n in range(10, 4_000))
        assert drafted < 0.1 * 4_000, vocabulary


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("vocabulary, least_of_ideal, least_used", [(300, 0.55, 0.9), (30, 0.5, 0.75)])
def test_odds_choose_the_suffix_and_end_the_draft(vocabulary, least_of_ideal, least_used, seed):
    """Phrases in random order: within one the next token is certain, after its end it could be any.

    The ideal drafter knows the rest of the phrase. It is half reached, or more, with few tokens drafted in
    vain, only with odds learned for each length of a suffix, and for whether the guess before was right.
    """
    rng, k = np.random.default_rng(seed), 8
    phrases = [rng.integers(0, vocabulary, rng.integers(4, 24)) for _ in range(40)]
    order = [phrases[i] for i in rng.integers(0, 40, 400)]
    text, ends = np.concatenate(order), np.cumsum([len(phrase) for phrase in order])
    drafter, start = SamDrafter(k, share_groups=False, max_bytes=SMALL, worth=0.6), len(text) // 3
    at, steps, drafted, used = start, 0, 0, 0
    while at < len(text):
        draft = drafter.propose("a", text[:at], 1)
        right = draft[: len(text) - at] == text[at : at + len(draft)]
        kept = len(right) if right.all() else int(right.argmin())
        at, steps, drafted, used = at + kept + 1, steps + 1, drafted + len(draft), used + kept
    ideal, at = 0, start
    while at < len(text):
        rest = ends[np.searchsorted(ends, at, side="right")] - at
        at, ideal = at + min(k, rest) + 1, ideal + 1
    assert steps <= ideal / least_of_ideal
    assert used >= least_used * drafted


def test_the_samples_of_a_prompt_draft_from_each_other_until_the_group_must_go():
    rng = np.random.default_rng(3)
    prompt, other, answer = (rng.integers(0, 1_000, n) for n in (20, 20, 60))
    first = np.concatenate([prompt, answer])
    drafter = SamDrafter(5, max_bytes=SMALL)
    drafter.propose("running", first, 20)
    again = first[:40].astype(np.int32)
    assert drafter.propose("sibling", again, 20).tolist() == first[40:45].tolist()
    drafter.end("running")
    drafter.end("sibling")
    assert drafter.propose("late", again, 20).tolist() == first[40:45].tolist()
    drafter.end("late")
    # Goes on elsewhere: what was output is now part of the prompt.
    assert drafter.propose("moved", again, 40).tolist() == first[40:45].tolist()
    assert len(drafter._groups) == 1
    drafter.propose("elsewhere", other, 20)
    assert len(drafter._groups) == 2

    alone = SamDrafter(5, share_groups=False, max_bytes=SMALL)
    alone.propose("running", first, 20)
    assert alone.propose("sibling", again, 20).tolist() == []
    alone.end("running")
    alone.end("sibling")
    assert alone.used_bytes == 0 and not alone._prompt_lengths


def test_texts_of_other_prompts_help_where_the_group_knows_nothing():
    rng = np.random.default_rng(4)
    answer = rng.integers(0, 1_000, 60)
    drafter = SamDrafter(5, max_bytes=SMALL)
    drafter.propose("a", np.concatenate([rng.integers(0, 1_000, 20), answer]), 20)
    tokens = np.concatenate([rng.integers(0, 1_000, 20), answer[:30]])
    assert drafter.propose("b", tokens, 20).tolist() == answer[30:35].tolist()


@pytest.mark.parametrize("share", [True, False])
def test_memory_is_bounded_and_comes_back(share):
    rng = np.random.default_rng(5)
    drafter = SamDrafter(4, share_groups=share, max_bytes=SMALL)
    limit = int(drafter._memory[sam.LIMIT]) * 4 * sam.CHUNK
    peak = 0
    for i in range(150):
        prompt, answer = rng.integers(0, 500, 30), np.tile(rng.integers(0, 500, 700), 3)
        tokens = np.concatenate([prompt, answer])
        for sample in range(3):
            drafter.propose(f"{i}/{sample}", tokens, 30)
        assert drafter.propose(f"{i}/0", tokens, 30).tolist() == answer[:4].tolist()
        for sample in range(3):
            drafter.end(f"{i}/{sample}")
        peak = max(peak, drafter.used_bytes)
    assert peak <= limit + 16 * 4 * sam.CHUNK
    if share:
        assert peak > 0.9 * limit and len(drafter._groups) < 150
    else:
        assert drafter.used_bytes == 0
    # What runs keeps its memory: it stops to draft, and continues when there is room again.
    tokens = rng.integers(0, 500, 400_000)
    for _ in range(400):
        drafter.propose("long", tokens, 1)
    seen = drafter._memory[drafter._texts["long"] + sam.SEEN]
    assert seen < 400_000 and drafter.used_bytes <= limit + 16 * 4 * sam.CHUNK
    assert (
        drafter.propose("new", tokens[:9], 9).tolist() == []
        and drafter.used_bytes <= limit + 17 * 4 * sam.CHUNK
    )
    drafter.end("long")
    drafter.propose("new", np.tile(tokens[:9], 9), 9)
    assert drafter.propose("new", np.tile(tokens[:9], 10), 9).tolist() == tokens[:4].tolist()


@pytest.mark.parametrize("max_bytes", [SMALL, 1 << 30])
def test_the_texts_get_what_the_table_leaves(max_bytes):
    limit = int(SamDrafter(2, max_bytes=max_bytes)._memory[sam.LIMIT]) * 4 * sam.CHUNK
    assert max_bytes - (17 << 20) < limit < max_bytes - (16 << 20)


def test_the_table_knows_what_last_followed_the_last_tokens_and_how_reliably():
    """Against a dictionary of contexts of 1 to 5 tokens: a guess goes when it was wrong twice in a row."""
    tokens = np.random.default_rng(6).choice(6, 900, p=[0.5, 0.3, 0.1, 0.05, 0.03, 0.02])
    drafter = SamDrafter(3, max_bytes=SMALL)
    odds = drafter._odds.copy()
    drafter.propose("a", tokens, 1)
    known: dict[tuple, tuple[int, bool]] = {}
    for n, token in enumerate(tokens.tolist()):
        for order in range(1, min(n, 5) + 1):
            context = tuple(tokens[n - order : n].tolist())
            guess, again = known.get(context, (None, False))
            if guess is None:
                known[context] = token, False
                continue
            kind = 2 * (sam.LENGTH_CLASSES + order) + again
            odds[kind] += ((guess == token) - odds[kind]) * sam.RATE
            known[context] = guess if again or guess == token else token, guess == token
    learned = slice(2 * sam.LENGTH_CLASSES, None)
    np.testing.assert_allclose(drafter._odds[learned], odds[learned])
    assert len(known) > 500
    memory, right = drafter._memory, 0
    for context, (guess, again) in known.items():
        hashed = sam.SEED
        for token in reversed(context):
            hashed = np.uint64(sam._mix(hashed, token))
        place, mark = sam._entry(memory, hashed)
        right += (memory[place], memory[place + 1]) == (mark | again, guess + 1)
    assert right >= 0.99 * len(known)  # some share a place


def test_other_tokens_under_the_same_name_are_a_new_text():
    drafter = SamDrafter(3, max_bytes=SMALL)
    drafter.propose("a", np.array([1, 2, 3, 4, 5, 6]), 2)
    drafter.propose("a", np.array([1, 2, 7, 8]), 2)
    drafter.propose("a", np.array([1, 2, 7, 9, 9]), 2)
    check_automaton(drafter, [(1, 2, 3, 4, 5, 6), (1, 2, 7, 8), (1, 2, 7, 9, 9)])


def test_errors_say_what_to_do():
    drafter = SamDrafter(3, max_bytes=SMALL)
    with pytest.raises(ValueError, match="below 0"):
        drafter.propose("a", np.array([1, 2, -1]), 2)
    for prompt_tokens in (0, 4):
        with pytest.raises(ValueError, match="whole prompt"):
            drafter.propose("b", np.array([1, 2, 3]), prompt_tokens)
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        SamDrafter(0)
    for max_bytes in (1 << 20, 4 << 30, 1 << 40):
        with pytest.raises(ValueError, match="max_bytes"):
            SamDrafter(3, max_bytes=max_bytes)
    drafter.end("unknown")


def test_expected_tokens_of_a_draft_are_about_those_that_are_right():
    """On text whose next token follows in 3 of 4 cases; without a draft nothing is expected."""
    rng, drafter = np.random.default_rng(0), SamDrafter(4)
    text, expected, right = [0], 0.0, 0
    while len(text) < 6000:
        text.append((text[-1] + 1) % 40 if rng.random() < 0.75 else int(rng.integers(0, 40)))
    tokens = np.array(text, np.int32)
    for n in range(3000, 5900):
        draft = drafter.propose("a", tokens[:n], 1)
        matches = draft == tokens[n : n + len(draft)]
        expected += drafter.chances.sum()
        right += len(draft) if matches.all() else int(matches.argmin())
        assert len(draft) == len(drafter.chances) and (np.diff(drafter.chances) <= 0).all()
    assert 0.7 * right < expected < 1.3 * right


def test_a_budget_cuts_the_work_of_a_call_and_changes_nothing_else():
    tokens = np.random.default_rng(0).integers(0, 4, 400)
    whole, cut = SamDrafter(3, max_bytes=SMALL), SamDrafter(3, max_bytes=SMALL)
    draft, total = whole.propose("a", tokens, 100, 1 << 30), whole.spent
    assert whole.seen("a") == 400 and cut.seen("a") == 0
    assert not len(cut.propose("a", tokens, 100, 0)) and (cut.spent, cut.seen("a")) == (0, 0)
    seen, spent = [0], 0
    while seen[-1] < 400:
        found = cut.propose("a", tokens, 100, 50)
        seen, spent = [*seen, cut.seen("a")], spent + cut.spent
        assert seen[-1] > seen[-2] and cut.spent < 50 + sam.LEARNING + 8
    assert spent == total > 400 and len(seen) > 20 and any(0 < n < 100 for n in seen)
    assert found.tolist() == draft.tolist() and np.array_equal(cut._memory, whole._memory)


def test_a_call_that_makes_room_continues_with_the_rest_of_its_budget():
    """The text of a finished request is dropped in the middle of a call."""
    drafter = SamDrafter(3, max_bytes=24 << 20)
    rng, budget = np.random.default_rng(0), 3_000_000
    old, new = (rng.integers(0, 50_000, 100_000) for _ in range(2))
    drafter.propose("old", old, 10, budget)
    drafter.end("old")
    used = drafter.used_bytes
    drafter.propose("new", new, 10, budget)
    assert drafter.seen("new") == 100_000 and drafter.used_bytes < 1.1 * used
    large = SamDrafter(3, max_bytes=64 << 20)
    large.propose("new", new, 10, budget)
    assert drafter.spent == large.spent < budget
