# SPDX-License-Identifier: Apache-2.0
"""The review corpus: several thousand movie reviews, balanced in sentiment, written by a grammar.

A review opens without a verdict, then speaks of a few aspects of the film (story, acting, music, ...),
may wander off into an aside, and may end in a recommendation. How often it praises is drawn first, the
*favor* of the review: from 0, everything is bad, to 1, everything is good. A prompt cut from the opening
therefore says nothing of what follows, and steering the completions is a task of its own.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path

import jrl

from .grammar import Grammar, Writer, load_grammar, tidy

RULES_FOLDER = Path(__file__).parent / "rules"
ASPECTS = ("story", "acting", "music", "pace", "direction", "look", "dialogue", "people", "ending")
OVERALL = ("verdict", "comparison")
FAVORS = (0.0, 0.15, 0.5, 0.85, 1.0)
FAVOR_WEIGHTS = (0.28, 0.18, 0.14, 0.16, 0.24)  # VADER hears praise louder than scorn: the mean is then zero
CONCESSIONS = 0.22
VERDICTS = 0.4
ASIDES = 0.15
CLOSINGS = 0.5
MIN_WORDS, MAX_WORDS = 4, 8  # of a prompt


@dataclass(frozen=True)
class Corpus:
    """What the example trains and judges on.

    Attributes:
      train_reviews: Texts for the tokenizer and for SFT.
      heldout_reviews: Texts that no stage trains on.
      train_prompts: Openings of training reviews, for the PPO rollouts.
      eval_prompts: Openings of held-out reviews; none of them is a training prompt, or starts a training
        review.
    """

    train_reviews: list[str]
    heldout_reviews: list[str]
    train_prompts: list[str]
    eval_prompts: list[str]


@functools.cache
def review_grammar() -> Grammar:
    """The grammar of movie reviews in `rules/*.txt`."""
    return load_grammar(sorted(RULES_FOLDER.glob("*.txt")))


def write_review(grammar: Grammar, rng: random.Random) -> str:
    """One review.

    Args:
      grammar: From `review_grammar`.
      rng: Source of all choices.
    Returns:
      Two to six sentences on one line: opening, aspects with a verdict before or after them, and perhaps an
      aside and a closing.
    """
    favor = rng.choices(FAVORS, FAVOR_WEIGHTS)[0]
    signs = [rng.random() < favor for _ in range(rng.choice((1, 1, 2)))]
    praise = sum(signs) / len(signs)
    writer = Writer(grammar, rng)
    aspects = rng.sample(ASPECTS, len(ASPECTS))
    sentences = [writer.expand("opening")]
    verdict_at = rng.choice((0, len(signs))) if praise != 0.5 and rng.random() < VERDICTS else None
    for i in range(len(signs) + 1):
        if i == verdict_at:
            sentences.append(f"{writer.expand(rng.choice(OVERALL) + _sign(praise > 0.5))}.")
        if i < len(signs):
            concedes = rng.random() < CONCESSIONS
            shape = (
                "concession"
                if concedes
                else "first"
                if i == 0
                else "same"
                if signs[i] == signs[i - 1]
                else "turn"
            )
            sentences.append(_speak(writer.expand(shape), signs[i], aspects, writer))
    if rng.random() < ASIDES:
        sentences.insert(rng.randint(1, len(sentences)), writer.expand("aside"))
    if rng.random() < CLOSINGS:
        sentences.append(writer.expand("closing" + ("~" if praise == 0.5 else _sign(praise > 0.5))))
    return " ".join(tidy(sentence) for sentence in sentences)


def _sign(favorable: bool) -> str:
    return "+" if favorable else "-"


def _speak(frame: str, favorable: bool, aspects: list[str], writer: Writer) -> str:
    """Puts clauses about the next aspects into a frame; a semicolon ends a clause that has a comma."""
    while (start := frame.find("<")) >= 0:
        agrees = frame[start + 1] == "+"
        clause = writer.expand(aspects.pop() + _sign(agrees == favorable))
        rest = frame[start + 3 :]
        frame = frame[:start] + clause + (rest.replace(", and <", "; <") if "," in clause else rest)
    return frame


def make_reviews(num_reviews: int, *, seed: int) -> list[str]:
    """Distinct reviews.

    Args:
      num_reviews: How many.
      seed: The same seed gives the same reviews, in the same order, on every machine.
    Returns:
      `num_reviews` texts, no two of them equal.
    """
    grammar, rng = review_grammar(), random.Random(seed)
    reviews: dict[str, None] = {}
    while len(reviews) < num_reviews:
        reviews[write_review(grammar, rng)] = None
    return list(reviews)


def make_prompts(reviews: list[str], *, seed: int) -> list[str]:
    """The first words of each review, `MIN_WORDS` to `MAX_WORDS` of them; repetitions are dropped."""
    rng = random.Random(seed)
    prompts = (" ".join(review.split()[: rng.randint(MIN_WORDS, MAX_WORDS)]) for review in reviews)
    return list(dict.fromkeys(prompts))


def make_corpus(num_reviews: int, *, num_eval_prompts: int, seed: int) -> Corpus:
    """Writes a corpus and splits it.

    Args:
      num_reviews: Reviews to train on.
      num_eval_prompts: Held-out prompts to judge by.
      seed: Of everything here.
    Returns:
      Training and held-out texts, and prompts cut from either.
    """
    reviews = make_reviews(num_reviews + 4 * num_eval_prompts, seed=seed)
    return split_corpus(reviews, num_train=num_reviews, num_eval_prompts=num_eval_prompts, seed=seed)


def load_corpus(source: str, *, num_eval_prompts: int, seed: int) -> Corpus:
    """Reads a corpus from a file, or from `datasets` by name, and holds out one review in ten, shuffled.

    Args:
      source: A .txt, .jsonl, .json or .csv file, or a `datasets` name; one review a line, record or row.
      num_eval_prompts: Held-out prompts to judge by, at most what the held-out reviews give.
      seed: Of the split and the prompts.
    """
    reviews = [text.strip() for text in jrl.load_samples(source) if text.strip()]
    random.Random(seed).shuffle(reviews)
    num_train = len(reviews) - len(reviews) // 10
    return split_corpus(reviews, num_train=num_train, num_eval_prompts=num_eval_prompts, seed=seed)


def split_corpus(reviews: list[str], *, num_train: int, num_eval_prompts: int, seed: int) -> Corpus:
    """Splits reviews and cuts prompts from both parts; held-out ones that begin a training review go."""
    train, heldout = reviews[:num_train], reviews[num_train:]
    openings = {" ".join(words[:n]) for words in map(str.split, train) for n in range(1, MAX_WORDS + 1)}
    unseen = [prompt for prompt in make_prompts(heldout, seed=seed + 1) if prompt not in openings]
    if not unseen:
        raise ValueError(f"no prompt can be held out of {len(reviews)} reviews; is the corpus too small?")
    return Corpus(train, heldout, make_prompts(train, seed=seed), unseen[:num_eval_prompts])
