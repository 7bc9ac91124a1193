# SPDX-License-Identifier: Apache-2.0
"""The contract between algorithms and language models, and their batches; letters as in `jrl.typing`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int

from jrl.typing.basic import Frozen, Params, PRNGKey

Trunk = Any
"""What the frozen trunk hands to the branch, a tree of arrays with leading rows: what a decoder's next layers read,
hidden states (B L D) among it, and an encoder's output where there is one. None where nothing below the branch is
frozen."""
Cache = Any
"""Key/value cache of a decoder: an explicit argument and result of `PolicyFns.decode`."""


class ModelInputs(NamedTuple):
    """Inputs of a language model.

    Attributes:
      tokens: Ids of the decoder.
      attention_mask: True on real tokens; positions are counted over them. Prompts of `decode` are padded on the left.
        Whole rows of `trunk` and `branch` are padded on the right, unless the policy attends by einsums alone.
      segment_ids: Of packed rows: nothing attends across two segments, and positions restart. None: one segment.
      context_tokens: Ids an encoder reads (seq2seq only).
      context_mask: True on the encoder's real tokens (seq2seq only).
      experts: Numbers of the k experts that each token is to visit in each of the M layers that have a mixture of them;
        −1 where the router chooses. None: everywhere. Read by `trunk` and `branch`.
    """

    tokens: Int[Array, "B L"]
    attention_mask: Bool[Array, "B L"]
    segment_ids: Int[Array, "B L"] | None = None
    context_tokens: Int[Array, "B C"] | None = None
    context_mask: Bool[Array, "B C"] | None = None
    experts: Int[Array, "B L M k"] | None = None


class ExpertLoad(NamedTuple):
    """Load of the experts of a mixture: sums over tokens and over layers, which add up over rows.

    Attributes:
      visits: By expert: how many tokens visited it.
      shares: By expert: its share of each token, as the router has it before the best are chosen; gradients pass
        through it.
      tokens: How many were counted, once a layer.
    """

    visits: Float[Array, "*rows E"]
    shares: Float[Array, "*rows E"]
    tokens: Float[Array, "*rows"]


class Features(NamedTuple):
    """Last hidden states, after the final norm.

    Attributes:
      policy: Read by the language-model head.
      value: Read by value and Q heads: the same array, unless the value function has a branch of its own.
      load: Of the experts, in the layers of the branch, one for each row; None where the policy does not count it.
    """

    policy: Float[Array, "*rows D"]
    value: Float[Array, "*rows D"]
    load: ExpertLoad | None = None


def as_they_are(weights: Params, num_rows: int, num_tokens: int) -> Params:
    """`PolicyFns.loop_weights` of a model whose `decode` reads its weights as they are trained."""
    return weights


def unrounded(weights: Params) -> Params:
    """`PolicyFns.rounded` of a model that computes in the dtype of its weights."""
    return weights


def shares_columns(cache: Cache) -> Cache:
    """`PolicyFns.own_columns` of a model whose rows all write the same column of the cache.

    Raises:
      ValueError: Always.
    """
    raise ValueError(
        "This model cannot go on from turn to turn: the rows of its cache have no columns of their own. Episodes need "
        "a causal language model."
    )


def keeps_all(cache: Cache, counts: Int[Array, "B"]) -> Cache:
    """`PolicyFns.forget` of such a model; raises as `shares_columns` does."""
    return shares_columns(cache)


def hands_on_itself(cache: Cache, whole: Cache, number: Int[Array, ""]) -> Cache:
    """`PolicyFns.within` of a model whose cache of a part of the rows is put into the whole one after `decode`."""
    return cache


def records_no_experts(cache: Cache) -> None:
    """`PolicyFns.visited` of a model that keeps no record."""


class Heads(Protocol):
    """`PolicyFns.heads`: what value and Q heads say of states."""

    def __call__(
        self, params: Params, hidden: Float[Array, "*rows D"], actions: Int[Array, "B T"] | None = None
    ) -> dict[str, Array]:
        """Reads the heads that `params` hold.

        Args:
          params: Trainable parameters, or some of them. What they hold no head for is missing from the result.
          hidden: `Features.value`.
          actions: One for each of the states (B T D), where Q values of these alone are wanted; None: of all. It is
            given with Q heads alone.
        Returns:
          Float32 by name: the value head gives `"values"` (...,), the Q heads `"q_values"` (heads, ..., V), with −inf
          in columns of a padded vocabulary, or with `actions` (heads, B, T).
        """


@dataclass(frozen=True)
class PolicyFns:
    """All an algorithm may know of a model: pure functions of `(params, frozen)`.

    The log-probability of a token is a composition: `logits(params, frozen, branch(params, frozen,
    trunk(frozen, inputs), inputs, dropout_key).policy)`. The cut between trunk and branch lets the policy and its
    reference share one trunk pass, and lets a trunk's output be reused for as long as only `params` change.

    Attributes:
      trunk: `(frozen, inputs) -> trunk`. The layers below the first trainable one; None where there are none.
      branch: `(params, frozen, trunk, inputs, dropout_key) -> Features` with rows (B L). `dropout_key` None means
        deterministic; RL always passes None.
      logits: `(params, frozen, hidden) -> logits`, (..., D) to (..., V) float32, with bias, scale and soft-cap
        inside; columns of a padded vocabulary are −inf.
      heads: From `Features.value`, see `Heads`.
      init_cache: `(params, frozen, prompts, length) -> cache`: room for `length` columns, prompt and samples together,
        and what every one of them reads beside: an encoder's answer to the context, a virtual prefix. Of the prompts'
        own tokens nothing is in it yet.
      decode: `(params, frozen, inputs, cache) -> (Features, cache)` with rows (B, L of inputs). Appends the inputs to
        the cache: the left-padded prompt first (prefill), then one token a call. The cache keeps its shapes and dtypes.
      loop_weights: `(params or frozen, B, T) -> the same`, as a loop of `decode` over T single tokens of B rows reads
        them fastest: arranged anew, an adapter rounded as products read it; `decode` and `logits` alone understand it.
      rounded: `params or frozen -> the same`, with kernels in the dtype in which `decode` and `logits` read them: it
        changes no result, and a loop over tokens moves fewer bytes.
      own_columns: `cache -> cache` in which every row has columns of its own: `decode` then writes the real tokens of a
        row one behind the other, and of its padding, on whichever side, nothing. Every array of it has leading rows.
      forget: `(cache, counts) -> cache` without the newest `counts` (B,) tokens of each row; the cache is one of
        `own_columns`.
      forgets_some: Whether `forget` may take some tokens of a row and leave others. False: none or all, because a
        recurrent state sums up all of them. Who needs a part of such a row lets it be read again.
      visited: `cache -> experts`, as `ModelInputs` has them, of the token in each column of the cache (B S M k); None
        where `decode` keeps no record of them.
      within: `(cache, whole, number) -> cache` of a part of the rows, with which `decode` may write into `whole`, the
        cache of all rows, whose arrays have an axis of parts in front. Of the cache that `decode` then returns, each
        array is the part's or, with the part in it, that of all rows.
    """

    trunk: Callable[[Frozen, ModelInputs], Trunk]
    branch: Callable[[Params, Frozen, Trunk, ModelInputs, PRNGKey | None], Features]
    logits: Callable[[Params, Frozen, Float[Array, "*rows D"]], Float[Array, "*rows V"]]
    heads: Heads
    init_cache: Callable[[Params, Frozen, ModelInputs, int], Cache]
    decode: Callable[[Params, Frozen, ModelInputs, Cache], tuple[Features, Cache]]
    loop_weights: Callable[[Params, int, int], Params] = as_they_are
    rounded: Callable[[Params], Params] = unrounded
    own_columns: Callable[[Cache], Cache] = shares_columns
    forget: Callable[[Cache, Int[Array, "B"]], Cache] = keeps_all
    forgets_some: bool = True
    visited: Callable[[Cache], Int[Array, "B S M k"] | None] = records_no_experts
    within: Callable[[Cache, Cache, Int[Array, ""]], Cache] = hands_on_itself


class Sequences(NamedTuple):
    """Right-padded prompt + completion rows and the window in which the completion is learned from.

    Attributes:
      inputs: The rows, (B L).
      starts: Index of the state before the first completion token: prompt length − 1.
      mask: Window position t speaks of the action at column `starts + 1 + t`; True where it was chosen by the policy
        (or demonstrated), False on padding and on environment turns. A row without any is padding.
    """

    inputs: ModelInputs
    starts: Int[Array, "B"]
    mask: Bool[Array, "B T"]


class SamplingKnobs(NamedTuple):
    """Traced sampling numbers: changing them recompiles nothing, but for one between None and a number.

    Attributes:
      temperature: Divides the logits; > 0.
      top_p: Mass of the nucleus kept; 1 keeps all. None: all are kept, and no nucleus is looked for.
      beta: Weight of Q − V beside the log-probabilities (ILQL); None: heads are not read.
      forbidden: True where the column's token may not follow the row's; None: all may.
      limits: Most tokens of each row; None: as many as the sampler is made for.
    """

    temperature: Float[Array, ""]
    top_p: Float[Array, ""] | None = None
    beta: Float[Array, ""] | None = None
    forbidden: Bool[Array, "V V"] | None = None
    limits: Int[Array, "B"] | None = None


class Completions(NamedTuple):
    """Sampled completions.

    Attributes:
      tokens: Sampled ids, pad after the end.
      lengths: Number of sampled tokens, the EOS included.
      terminated: True where the row ended by EOS; False where the length limit cut it.
      logprobs: Of the sampled ids under the processed distribution (after temperature and filters); 0 after the end.
      actions: True on sampled ids, False on those that an environment wrote between them, which are counted in
        `lengths` and have no log-probability; None: all are sampled.
      experts: As in `ModelInputs`, of the left-padded prompt and what was written behind it, but for the last token,
        which the sampler never reads (B P+T−1 M k); None: no record was kept.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    terminated: Bool[Array, "B"]
    logprobs: Float[Array, "B T"]
    actions: Bool[Array, "B T"] | None = None
    experts: Int[Array, "B S M k"] | None = None


class Predictions(NamedTuple):
    """A model's predictions for the actions of a window. Finite and meaningless at mask 0.

    Attributes:
      logprobs: log π_θ of the actions, in nats: unfiltered logits divided by the temperature.
      values: V_θ of the state before each action; None where the model has no value head.
      entropy: H of the whole distribution at each action; None where nobody asked.
      logits: Makes the logits (B, T, V) of the actions, divided by the temperature; a padded vocabulary ends in −inf.
        They take memory where they are asked for, and none where they are not.
      full_kl: KL(π_θ ‖ π_ref) of the whole distributions at the state before each action, in nats; None where nobody
        asked.
      load: Of the experts; see `Features`.
    """

    logprobs: Float[Array, "B T"]
    values: Float[Array, "B T"] | None
    entropy: Float[Array, "B T"] | None
    logits: Callable[[], Float[Array, "B T V"]]
    full_kl: Float[Array, "B T"] | None = None
    load: ExpertLoad | None = None


class Scored(NamedTuple):
    """Result of a scoring pass over completion windows: of unfiltered logits divided by the rollout temperature.

    Attributes:
      logprobs: Under the policy at the time of scoring.
      ref_logprobs: Under the frozen reference; None where the algorithm has none.
      values: V(s_t), the state before action t; None where the algorithm has no critic.
      full_kl: KL(policy ‖ reference) of the whole distributions at s_t, in nats; None unless the penalty is "full".
    """

    logprobs: Float[Array, "B T"]
    ref_logprobs: Float[Array, "B T"] | None = None
    values: Float[Array, "B T"] | None = None
    full_kl: Float[Array, "B T"] | None = None


class Rollouts(NamedTuple):
    """All rollouts of one iteration of an online algorithm.

    Attributes:
      sequences: Prompts and completions.
      scored: Log-probabilities and values from before the first optimizer step.
      rewards: The user's reward of each action, neither clipped nor penalised: one score a completion sits on the last
        action of its row.
      sampler_logprobs: Of the actions under the distribution that they were drawn from; None: not kept.
      groups: Number of the prompt of each row: equal numbers are samples of one prompt; None: every row has its own.
      greedy_scores: Score of the greedy completion of each row's prompt; None: none was made.
      scores_by_function: Score of each reward function, unweighed, NaN where it failed or does not apply; None: the
        algorithm reads their sum alone.
      kept: False on rows that the sampling rules leave out of the update; None: they leave out none.
    """

    sequences: Sequences
    scored: Scored
    rewards: Float[Array, "N T"]
    sampler_logprobs: Float[Array, "N T"] | None = None
    groups: Int[Array, "N"] | None = None
    greedy_scores: Float[Array, "N"] | None = None
    scores_by_function: Float[Array, "N F"] | None = None
    kept: Bool[Array, "N"] | None = None


class SamplingRules(NamedTuple):
    """Rules by which completions become rollouts, and by which their lengths count: the host decides, after rewards.

    A group is mixed where two of its raw scores differ: before any shaping, and without the rows that are left out.

    Attributes:
      mixed_only: Learns from mixed groups alone.
      max_rounds: Rounds of sampling in which an iteration fills up with mixed groups; 1: what the first one lacks stays
        empty.
      prompts_per_round: Prompts of a round; None: as many as an iteration learns from.
      mask_truncated: Leaves out completions that the length limit cut, of the statistics of their groups, too.
      overlong_buffer: Tokens below the length limit over which the penalty for length grows; None: there is none.
      overlong_penalty: Its size at the limit, in units of the score.
      refuse_negative: Ends the run on a raw score below 0, of which the estimator would make nonsense.
    """

    mixed_only: bool = False
    max_rounds: int = 1
    prompts_per_round: int | None = None
    mask_truncated: bool = False
    overlong_buffer: int | None = None
    overlong_penalty: float = 1.0
    refuse_negative: bool = False

    @property
    def refills(self) -> bool:
        """True where the prompts that an iteration asks for are not known before it begins."""
        return self.max_rounds > 1 or self.prompts_per_round is not None


class ILQLBatch(NamedTuple):
    """Rewarded samples for offline learning. The window is compact: it holds the actions alone, one after another, so
    that between two turns the state after the last action of one is the state before the first action of the next.

    Attributes:
      inputs: The rows, (B L), right-padded.
      columns: Column of the state before each action; the action itself is the token one column further. 0 at mask 0.
      mask: True on actions; they come first. A row without any is padding.
      rewards: Of each action. Of a whole sample it is standardised, and 0 but for the last action.
      after: Rows that end in the state behind the last action of each row, in which the next row of the episode acts;
        a row without tokens: that state is terminal. None: all are.
      returns_after: Discounted return of the episode from that state on; None: 0.
    """

    inputs: ModelInputs
    columns: Int[Array, "B T"]
    mask: Bool[Array, "B T"]
    rewards: Float[Array, "B T"]
    after: ModelInputs | None = None
    returns_after: Float[Array, "B"] | None = None


class PreferenceBatch(NamedTuple):
    """Two completions of each prompt, one preferred to the other.

    Attributes:
      chosen: Prompts with the preferred completion; the mask is True on its tokens.
      rejected: The same prompts with the other one, in arrays of the same widths.
      valid: False on copies that only fill the batch up.
      ref_chosen_logprobs: log π_ref of the preferred completion, per token of the window; 0 at mask 0.
      ref_rejected_logprobs: log π_ref of the other one, likewise.
    """

    chosen: Sequences
    rejected: Sequences
    valid: Bool[Array, "B"]
    ref_chosen_logprobs: Float[Array, "B T"]
    ref_rejected_logprobs: Float[Array, "B T"]


class ComparisonBatch(NamedTuple):
    """Pairs of texts that a reward model learns to rank.

    Attributes:
      chosen: The preferred texts, prompt and completion, right-padded.
      rejected: The other ones, in arrays of the same width.
      valid: False on copies that only fill the batch up.
      margins: By how much the preferred score should exceed the other one; 0 where the data says nothing.
    """

    chosen: ModelInputs
    rejected: ModelInputs
    valid: Bool[Array, "B"]
    margins: Float[Array, "B"]


Scorer = Callable[[Params, Frozen, ModelInputs, PRNGKey | None], Float[Array, "B"]]
"""A reward model as algorithms know it: `(params, frozen, inputs, dropout_key) -> scores`, one float32 a row."""


class RewardFn(Protocol):
    """The user's reward: called with keywords only, and only with those its signature accepts.

    Keywords: `samples`, `prompts`, `outputs` (texts), `tokenizer`, `output_tokens` (the sampled ids) and one for each
    metadata key of the prompts. Returns one float a sample, or one list of floats a sample, one a token.
    """

    def __call__(self, *, samples: list[str], prompts: list[str], outputs: list[str]) -> Any:
        """Returns the rewards."""
        ...
