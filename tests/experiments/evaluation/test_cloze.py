"""Test that cloze items are cut so that only the context reveals the true choice, and that scores are as documented."""

import hashlib
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fewbits.experiments.evaluation.cloze import ClozeItems, cloze_items, evaluate_cloze
from tests.experiments.evaluation.evaluation_inputs import Bigram, Bytes, LanguageModel, Recurrent, Text, successor
from tests.messages import naming

BYTES = Bytes()


def source(seed: int, lines: int = 120) -> str:
    """Return a text that looks like a program and has no line twice."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 6))) for _ in range(40)]
    text = []
    for number in range(lines):
        gap = "\n" if draw.random() < 0.1 else ""
        indent = " " * 4 * draw.randint(0, 2)
        text.append(f"{gap}{indent}{' '.join(draw.choices(words, k=4))} {seed}.{number}\n")
    return "".join(text)


TEXTS = [source(seed) for seed in range(6)]
CORPUS = Text(validation=[BYTES.encode(text) for text in TEXTS])


def cut(count: int = 40, context: int = 48, continuation: int = 8, seed: int = 3) -> ClozeItems:
    return cloze_items(CORPUS, "validation", count=count, context=context, continuation=continuation, seed=seed)


def strings(tokens: Tensor) -> list[str]:
    return [BYTES.decode(row) for row in tokens.tolist()]


# Items


def test_items_depend_on_text_seed_and_count_alone() -> None:
    items = cut()
    data = items.contexts.numpy().tobytes() + items.choices.numpy().tobytes()
    random.seed(0)
    torch.manual_seed(0)
    again = cut()
    assert torch.equal(items.contexts, again.contexts)
    assert torch.equal(items.choices, again.choices)
    assert (
        hashlib.sha256(data).hexdigest()[:16] == "97c3214a1cefa43b"
    )  # items must stay the same, because stored trials were evaluated on them
    assert not torch.equal(items.contexts, cut(seed=4).contexts)


def test_the_first_items_are_the_same_whatever_the_count() -> None:
    few, many = cut(count=10), cut(count=40)
    assert torch.equal(few.contexts, many.contexts[:10])
    assert torch.equal(few.choices, many.choices[:10])


def test_no_place_is_used_twice() -> None:
    assert len(set(strings(cut(count=200).contexts))) == 200


def test_the_first_choice_is_what_follows_within_one_document() -> None:
    items = cut()
    assert items.contexts.shape == (40, 48)
    assert items.choices.shape == (40, 4, 8)
    for context, choices in zip(strings(items.contexts), items.choices, strict=True):
        assert any(context + strings(choices)[0] in text for text in TEXTS)


def places(text: str, part: str) -> list[int]:
    return [i for i in range(len(text)) if text.startswith(part, i)]


def test_every_choice_follows_the_token_that_ends_the_context_somewhere_apart() -> None:
    joined, items = "".join(TEXTS), cut(count=100)
    for context, choices in zip(strings(items.contexts), items.choices, strict=True):
        truth, *wrong = strings(choices)
        assert len({truth, *wrong}) == 4
        (place,) = [start + 48 for start in places(joined, context + truth)]
        for choice in wrong:
            starts = [start + 1 for start in places(joined, context[-1] + choice)]
            assert any(abs(start - place) >= 48 + 8 for start in starts)


def pairs(tokens: Sequence[int]) -> Tensor:
    """Return counts[before, after] of neighbouring tokens, float64."""
    counts = torch.zeros(256, 256, dtype=torch.float64)
    for before, after in pairwise(tokens):
        counts[before, after] += 1
    return counts


def test_a_model_of_token_pairs_is_near_chance_and_its_guesses_are_close() -> None:
    counts = pairs(CORPUS.splits["validation"][0].tolist() + CORPUS.splits["validation"][1].tolist())
    model = Bigram((counts + 1e-3).log())
    score = evaluate_cloze(model, cut(count=500))
    assert abs(score.accuracy - 0.25) < 3 * score.standard_error


def test_wrong_choices_surprise_a_model_of_token_pairs_as_the_truth_does() -> None:
    joined = BYTES.encode("".join(TEXTS))
    counts = pairs(joined)
    bits = -(counts / counts.sum(1, keepdim=True)).log2()

    def surprise(text: Sequence[int]) -> float:
        return sum(bits[before, after].item() for before, after in pairwise(text))

    items, draw = cut(count=100), random.Random(0)
    texts = torch.cat([items.contexts[:, None, -1:].expand(-1, 4, -1), items.choices], dim=2)
    costs = [[surprise(text) for text in row] for row in texts.tolist()]
    apart = [abs(other - row[0]) for row in costs for other in row[1:]]
    anywhere = [surprise(joined[i : i + 9]) for i in draw.choices(range(len(joined) - 9), k=300)]
    assert sum(apart) / len(apart) < 1.0  # bits
    assert torch.tensor(anywhere).std() > 4.0


def test_items_lie_within_documents_and_need_not_be_text() -> None:
    draw = random.Random(0)
    parts = [draw.choices(range(8), k=size) for size in (200, 20, 180, 0)]
    items = cloze_items(Text(ood=parts), "ood", count=60, context=30, continuation=10)
    whole = [" ".join(map(str, part)) for part in parts]
    for context, choices in zip(items.contexts.tolist(), items.choices.tolist(), strict=True):
        assert any(" ".join(map(str, context + choices[0])) in part for part in whole)
        assert all(any(" ".join(map(str, context[-1:] + choice)) in part for part in whole) for choice in choices)


def test_choices_that_read_like_the_truth_are_passed_over() -> None:
    """Check that the four choices of an item are different texts, although many lines of the corpus are equal."""
    lines = ["same line\n"] * 60 + [f"{number} line of some length\n" for number in range(60)]
    random.Random(0).shuffle(lines)
    items = cloze_items(Text(ood=[BYTES.encode("".join(lines))]), "ood", count=200, context=16, continuation=9)
    for choices in items.choices:
        assert len(set(strings(choices))) == 4


def test_too_little_text_is_an_error_that_says_how_much_there_is() -> None:
    short = Text(ood=[BYTES.encode(TEXTS[0])[:500]])
    with pytest.raises(ValueError, match=naming("445 items", "ood", "48 + 8", "500 tokens", "445 positions")):
        cloze_items(short, "ood", count=445, context=48)
    with pytest.raises(ValueError, match=naming("446 items", "ood", "48 + 8", "500 tokens", "445 positions")):
        cloze_items(short, "ood", count=446, context=48)
    with pytest.raises(ValueError, match=naming("48 + 8", "3 tokens", "0 positions")):
        cloze_items(Text(ood=[[1, 2, 3]]), "ood", count=1, context=48)
    with pytest.raises(ValueError, match="split 'ood' has no documents"):
        cloze_items(Text(ood=[]), "ood", count=1)


@pytest.mark.parametrize("name", ["count", "context", "continuation"])
def test_bad_counts_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0: an integer of 1 or more"):
        cut(**{name: 0})


# Scores


class Memory(LanguageModel):
    """A model that has memorised the texts: after 24 tokens of a text, it predicts the next token with certainty."""

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self.device = nn.Parameter(torch.zeros(()))
        self.next = {text[i : i + 24]: text[i + 24] for text in texts for i in range(len(text) - 24)}

    def forward(self, tokens: Tensor) -> Tensor:
        logits = torch.zeros(*tokens.shape, 256)
        for row, text in enumerate(strings(tokens)):
            for i in range(23, len(text)):
                if (known := self.next.get(text[i - 23 : i + 1])) is not None:
                    logits[row, i, ord(known)] = 20.0
        return logits


def test_a_model_that_knows_the_text_is_always_right() -> None:
    score = evaluate_cloze(Memory(TEXTS), cut())
    assert score.each.tolist() == [1.0] * 40
    assert (score.accuracy, score.standard_error, score.count) == (1.0, 0.0, 40)


def test_a_model_that_says_nothing_is_at_chance_exactly() -> None:
    score = evaluate_cloze(Bigram(torch.zeros(256, 256)), cut(count=100))
    assert score.each.tolist() == [0.25] * 100
    assert score.accuracy == 0.25
    assert score.standard_error == pytest.approx((0.25 * 0.75 / 100) ** 0.5)


@pytest.mark.parametrize(
    ("choices", "credit"),
    [
        (["bcd", "xyz", "bdc", "cbd"], 1.0),
        (["bcx", "bcd", "xyz", "zzz"], 0.0),
        (["bcd", "bcd", "xyz", "zzz"], 1 / 2),
        (["bcd", "zzz", "bcd", "bcd"], 1 / 3),
        (["xyz", "bcd", "bcd", "zzz"], 0.0),
        (
            ["bcx", "xbc", "xxx", "yyy"],
            1.0,
        ),  # after "a", "bcx" has two successors (b, c), and "xbc" has one (c)
    ],
)
def test_the_likeliest_choice_counts_and_a_tie_shares(choices: list[str], credit: float) -> None:
    tokens = torch.tensor([[BYTES.encode(choice) for choice in choices]])
    items = ClozeItems(torch.tensor([BYTES.encode("za")]), tokens)
    assert evaluate_cloze(successor(), items).each.tolist() == [credit]


def test_a_diverged_model_earns_nothing() -> None:
    assert evaluate_cloze(Bigram(torch.full((256, 256), torch.nan)), cut(count=5)).each.tolist() == [0.0] * 5


def test_choices_are_scored_by_the_sum_of_their_likelihoods_given_the_context() -> None:
    model, items = Recurrent(), cut(count=30)
    wanted = []
    for context, choices in zip(items.contexts, items.choices, strict=True):
        sums = []
        for choice in choices:
            text = torch.cat([context, choice])
            likelihoods = model(text[None, :-1]).log_softmax(-1)[0, torch.arange(len(text) - 1), text[1:]]
            sums.append(likelihoods[len(context) - 1 :].sum().item())
        wanted.append(float(sums[0] == max(sums)))
    assert 0 < sum(wanted) < 30
    for batch in (1, 7, 64):
        assert evaluate_cloze(model, items, batch=batch).each.tolist() == wanted


def test_a_model_is_left_in_training() -> None:
    model = Recurrent().train()
    evaluate_cloze(model, cut(count=5))
    assert model.training
