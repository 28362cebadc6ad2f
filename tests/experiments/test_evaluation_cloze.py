"""The cloze task: how items are cut, that nothing but the context gives them away, and how they are scored."""

import hashlib
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fewbits.experiments.evaluation.cloze import ClozeItems, cloze_items, evaluate_cloze
from tests.experiments.evaluation_inputs import Bigram, Bytes, LanguageModel, Recurrent, Text, successor

BYTES = Bytes()


def source(seed: int, lines: int = 120) -> str:
    """Something like a program, no line of which occurs twice anywhere."""
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


def cut(count: int = 40, context: int = 48, continuation: int = 16, seed: int = 3) -> ClozeItems:
    return cloze_items(CORPUS, "validation", BYTES, count=count, context=context, continuation=continuation, seed=seed)


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
    assert hashlib.sha256(data).hexdigest()[:16] == "b2a5de76a88db742"  # trials of other years and machines
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
    assert items.choices.shape == (40, 4, 16)
    for context, choices in zip(strings(items.contexts), items.choices, strict=True):
        assert any(context + strings(choices)[0] in text for text in TEXTS)


def indent(text: str) -> str:
    """The white space that a line begins with, where a text ends in just that."""
    line = text.rpartition("\n")[2]
    assert "\n" in text
    assert not line.strip()
    return line


def test_every_choice_begins_a_line_after_the_indentation_that_ends_the_context() -> None:
    items = cut()
    depths = set()
    for context, choices in zip(strings(items.contexts), items.choices, strict=True):
        depths.add(indent(context))
        for choice in strings(choices):
            (text,) = [text for text in TEXTS if choice in text]
            assert choice[0].strip()
            assert indent(text[: text.index(choice)]) == indent(context)
    assert depths == {"", " " * 4, " " * 8}


def test_wrong_choices_differ_and_lie_apart_from_the_item() -> None:
    joined = "".join(TEXTS)
    items = cut(count=100)
    for context, choices in zip(strings(items.contexts), items.choices, strict=True):
        truth, *wrong = strings(choices)
        assert len({truth, *wrong}) == 4
        place = joined.index(context + truth) + len(context)
        assert all(abs(joined.index(choice) - place) >= 48 + 16 for choice in wrong)


def test_choices_that_read_like_the_truth_are_passed_over() -> None:
    lines = ["same line\n"] * 60 + [f"{number} line of some length\n" for number in range(60)]
    random.Random(0).shuffle(lines)
    corpus = Text(validation=[BYTES.encode("".join(lines))])
    items = cloze_items(corpus, "validation", BYTES, count=50, context=16, continuation=9)
    for choices in items.choices:
        assert len(set(strings(choices))) == 4


class Pieces:
    """A tokenizer whose tokens hold line breaks and spaces together with text, as those of BPE do."""

    def __init__(self) -> None:
        self.pieces = ["\n", "    ", " ", ":\n", "\n\n", "\n    "]

    def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.pieces[token] for token in tokens)

    def learn(self, *texts: str) -> list[int]:
        start = len(self.pieces)
        self.pieces += texts
        return list(range(start, len(self.pieces)))


def test_lines_are_found_where_tokens_mix_breaks_and_spaces_with_text() -> None:
    pieces, draw, tokens = Pieces(), random.Random(0), []
    for number in range(200):
        tokens += pieces.learn(f"a{number}", f" b{number}") + draw.choices(range(6), k=draw.randint(1, 2))
    items = cloze_items(Text(ood=[tokens]), "ood", pieces, count=100, context=12, continuation=5)
    whole = pieces.decode(tokens)
    depths = set()
    for context, choices in zip(items.contexts.tolist(), items.choices.tolist(), strict=True):
        depths.add(depth := indent(pieces.decode(context)))
        for choice in map(pieces.decode, choices):
            assert indent(whole[: whole.index(choice)]) == depth
    assert len(depths) > 2


def test_symbols_that_are_no_text_are_cut_anywhere() -> None:
    corpus = Text(validation=[list(range(200)), list(range(200, 220)), list(range(220, 400))])
    items = cloze_items(corpus, "validation", None, count=100, context=30, continuation=10)
    for context, choices in zip(items.contexts.tolist(), items.choices.tolist(), strict=True):
        assert context + choices[0] == list(range(context[0], context[0] + 40))
        assert not context[0] < 220 <= choices[0][-1]  # across documents
    assert {context[0] % 3 for context in items.contexts.tolist()} == {0, 1, 2}


def test_too_little_text_is_an_error_that_says_how_much_there_is() -> None:
    with pytest.raises(ValueError, match=r"count=1000: split 'validation' holds \d+ items of 48 \+ 16 tokens"):
        cut(count=1000)
    with pytest.raises(ValueError, match="holds 0 items of 48 \\+ 16 tokens \\(3 tokens, 0 places"):
        cloze_items(Text(ood=[[1, 2, 3]]), "ood", BYTES, count=1, context=48, continuation=16)
    with pytest.raises(ValueError, match="split 'ood' holds no documents"):
        cloze_items(Text(ood=[]), "ood", BYTES, count=1)


@pytest.mark.parametrize("name", ["count", "context", "continuation"])
def test_bad_counts_are_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0: an integer from 1 up"):
        cut(**{name: 0})


# Scores


class Memory(LanguageModel):
    """It has read the texts: after 24 tokens that it knows, what came next is certain; all else is unlikely."""

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
        (["bcx", "xbc", "xxx", "yyy"], 1.0),  # two steps up of three, from the a before it, against one
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
