# SPDX-License-Identifier: Apache-2.0
import asyncio
import functools
import gc
import math
import threading
import time
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from jrl.rollout.keywords import refuse_async, reward_functions, unique_names
from jrl.rollout.rewards import (
    RewardError,
    call_metric_fn,
    call_reward_fn,
    call_reward_fns,
    to_reward_matrix,
)
from jrl.rollout.text import Texts

TEXTS = Texts(
    samples=["ab", "cde", "fg"],
    prompts=["a", "c", "f"],
    outputs=["b", "de", "g"],
    output_tokens=[[7, 1], [8, 9, 1], [7]],
    lengths=np.array([2, 3, 1], np.int32),
    stopped=np.array([False, False, True]),
)
METADATA = {"topic": ["x", "y", "z"]}


def rewards_of(reward_fn, *, metadata=METADATA, **options):
    return call_reward_fn(reward_fn, TEXTS, tokenizer="tokenizer", metadata=metadata, **options)


def returning(answer):
    return lambda outputs: answer


class TestKeywords:
    def test_only_what_the_signature_takes(self):
        def reward_fn(outputs, topic, *, output_tokens, weight=2.0):
            assert (
                outputs == TEXTS.outputs
                and topic == METADATA["topic"]
                and output_tokens == TEXTS.output_tokens
            )
            return [weight] * 3

        assert rewards_of(reward_fn) == [2.0] * 3

    def test_everything_where_it_takes_everything(self):
        seen = {}

        def reward_fn(samples, **others):
            seen.update(others, samples=samples)
            return [0.0] * 3

        rewards_of(reward_fn)
        assert seen == {
            "samples": TEXTS.samples,
            "prompts": TEXTS.prompts,
            "outputs": TEXTS.outputs,
            "tokenizer": "tokenizer",
            "output_tokens": TEXTS.output_tokens,
            "topic": METADATA["topic"],
        }

    def test_methods_and_objects(self):
        class Judge:
            def __call__(self, prompts):
                return [float(len(prompt)) for prompt in prompts]

        assert rewards_of(Judge()) == rewards_of(Judge().__call__) == [1.0] * 3

    def test_what_it_is_given_is_its_own(self):
        def reward_fn(outputs, output_tokens, topic):
            outputs.clear()
            output_tokens[0].clear()
            topic.clear()
            return [0.0] * 3

        rewards_of(reward_fn)
        assert TEXTS.outputs == ["b", "de", "g"] and TEXTS.output_tokens[0] == [7, 1]
        assert METADATA == {"topic": ["x", "y", "z"]}

    def test_so_is_what_prompts_carry(self):
        metadata = {"answer": [{"number": 1}, [2], "3"]}

        def reward_fn(answer):
            answer[0].clear()
            answer[1].clear()
            return [0.0] * 3

        call_reward_fn(reward_fn, TEXTS, tokenizer=None, metadata=metadata)
        assert metadata == {"answer": [{"number": 1}, [2], "3"]}

    @pytest.mark.parametrize("reward_fn", [len, lambda outputs, judge: [0.0] * 3])
    def test_what_there_is_not(self, reward_fn):
        with pytest.raises(ValueError, match=r"`(obj|judge)`, which it cannot be given by keyword.*'topic'"):
            rewards_of(reward_fn)

    def test_metadata_may_not_hide_the_texts(self):
        with pytest.raises(ValueError, match=r"may not be called \['outputs'\]"):
            rewards_of(returning([0.0] * 3), metadata={"outputs": [1, 2, 3]})


class TestAnswers:
    @pytest.mark.parametrize(
        "answer",
        [
            [1, 2.0, True],
            (1.0, np.float32(2), np.array(1.0)),
            np.array([1.0, 2.0, 1.0]),
            np.array([[1.0], [2.0], [1.0]]),
            jnp.array([1.0, 2.0, 1.0]),
            [jnp.float32(1), jnp.array([2.0]), np.array([1.0])],
        ],
    )
    def test_one_number_a_sample(self, answer):
        found = rewards_of(returning(answer))
        assert found == [1.0, 2.0, 1.0] and all(type(reward) is float for reward in found)

    def test_one_number_a_token(self):
        found = rewards_of(returning([[1.0, 2.0], np.array([3.0, 4.0, 5.0]), 6.0]))
        assert found[0].tolist() == [1.0, 2.0] and found[1].tolist() == [3.0, 4.0, 5.0] and found[2] == 6.0
        assert found[0].dtype == np.float32

    @pytest.mark.parametrize(
        ("answer", "message", "index"),
        [
            ([0.0, 1.0], "one reward a sample: got 2 for 3", None),
            (1.0, "one reward a sample, a list of 3, got float", None),
            (None, "got NoneType. Is there no `return`?", None),
            ((0.0 for _ in range(3)), "got generator, which is read once: make a list", None),
            ({"a": 1.0}, "got dict", None),
            ([0.0, float("nan"), 0.0], "must be finite, got nan. Sample 1 has the prompt 'c'", 1),
            ([0.0, 0.0, float("-inf")], "must be finite, got -inf. Sample 2 has the prompt 'f'", 2),
            ([0.0, "1.0", 0.0], "must be a number.*got '1.0', of type str. Sample 1", 1),
            (
                [[0.0, 0.0], [0.0], 0.0],
                r"must match len\(output_tokens\[1\]\): got 1 for 3 tokens.*Sample 1",
                1,
            ),
            ([[0.0, np.inf], 0.0, 0.0], "must be finite, got inf at token 1. Sample 0", 0),
        ],
    )
    def test_anything_else_is_named(self, answer, message, index):
        with pytest.raises(RewardError, match=message) as caught:
            rewards_of(returning(answer))
        assert caught.value.index == index
        assert caught.value.prompt == (None if index is None else TEXTS.prompts[index])

    def test_none_is_no_failure(self):
        for skip_errors in (False, True):
            assert rewards_of(returning([1.0, None, 2.0]), skip_errors=skip_errors) == [1.0, None, 2.0]

    def test_skip_leaves_bad_rows_out(self):
        found = rewards_of(returning([0.5, float("nan"), [1.0, 2.0]]), skip_errors=True)
        assert found[0] == 0.5 and np.isnan(found[1]) and np.isnan(found[2])

    def test_a_wrong_count_is_never_skipped(self):
        with pytest.raises(RewardError, match="got 2 for 3"):
            rewards_of(returning([0.0, 1.0]), skip_errors=True)


class TestExceptions:
    @staticmethod
    def fails_on(bad, calls):
        def reward_fn(outputs, topic, tokenizer):
            calls.append(list(outputs))
            assert tokenizer == "tokenizer"
            if bad in outputs:
                raise KeyError(bad)
            return [float(len(output)) for output in outputs]

        return reward_fn

    def test_the_row_to_blame_is_named(self):
        calls = []
        with pytest.raises(
            RewardError, match=r"raised KeyError: 'de'\. Sample 1 has the prompt 'c'"
        ) as caught:
            rewards_of(self.fails_on("de", calls))
        assert (caught.value.index, caught.value.prompt) == (1, "c")
        assert isinstance(caught.value.__cause__, KeyError)
        assert calls == [["b", "de", "g"], ["b"], ["de"]]

    def test_single_rows_are_tried_only_after_a_failure(self):
        calls = []
        assert rewards_of(self.fails_on("?", calls)) == [1.0, 2.0, 1.0]
        assert len(calls) == 1

    def test_skip_scores_the_others(self, caplog):
        found = rewards_of(self.fails_on("de", []), skip_errors=True)
        assert found[0] == found[2] == 1.0 and np.isnan(found[1])
        assert "by hand: 'de'." in caplog.text and "or set" not in caplog.text  # it is set

    def test_skipping_is_offered_where_it_is_not_set(self):
        with pytest.raises(RewardError, match=r"by hand: 'de'; or set `train\.reward_errors: skip`"):
            rewards_of(self.fails_on("de", []))

    def test_no_row_to_blame(self):
        def reward_fn(outputs):
            if len(outputs) > 1:
                raise RuntimeError("too many")
            return [0.0]

        with pytest.raises(RewardError, match=r"raised RuntimeError: too many.*none of them alone") as caught:
            rewards_of(reward_fn)
        assert caught.value.index is None

    @pytest.mark.parametrize("timeout", [None, 30.0])
    @pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError("late")])
    def test_an_exit_is_one(self, error, timeout):
        def reward_fn(outputs):  # as where it runs what the policy wrote
            if "de" in outputs:
                raise error
            return [1.0] * len(outputs)

        with pytest.raises(RewardError, match=f"raised {type(error).__name__}: {error}. Sample 1"):
            rewards_of(reward_fn, timeout=timeout)
        found = rewards_of(reward_fn, timeout=timeout, skip_errors=True)
        assert found[0] == found[2] == 1.0 and np.isnan(found[1])

    def test_an_answer_that_must_be_awaited(self):
        async def judge(outputs):
            return [1.0] * len(outputs)

        with pytest.raises(RewardError, match=r"got a coroutine\. Give the `async def` function itself"):
            rewards_of(lambda outputs: judge(outputs))
        with pytest.raises(
            RewardError, match=r"got a coroutine\. .*`return asyncio.run\(judge\(outputs\)\)`"
        ):
            TestMetrics.metrics_of(lambda outputs: judge(outputs))

    def test_an_async_function_is_refused_before_it_is_called(self):
        async def judge(outputs): ...

        async def stream(outputs):
            yield 1.0

        class Judge:
            async def __call__(self, outputs): ...

        for function in (judge, stream, Judge(), functools.partial(judge, outputs=[])):
            with pytest.raises(ValueError, match="`metric_fn` must be a function, got an async one"):
                refuse_async(function, "metric_fn")
        refuse_async(rewards_of, "metric_fn")

    def test_an_interrupt_is_no_failure(self):
        def reward_fn(outputs):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            rewards_of(reward_fn, skip_errors=True)


class TestSeveral:
    @staticmethod
    def rewards_of(functions, **options):
        return call_reward_fns(functions, TEXTS, tokenizer="tokenizer", metadata=METADATA, **options)

    def test_a_list_for_each_in_their_order(self):
        async def asked(outputs):
            return [3.0] * len(outputs)

        given = {"a": returning([1.0] * 3), "b": asked, "c": returning([None, 2.0, 2.0])}
        assert self.rewards_of(given) == [[1.0] * 3, [3.0] * 3, [None, 2.0, 2.0]]

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ([0.0], "`b` must return one reward a sample: got 1 for 3"),
            ([0.0, "x", 0.0], "A reward of `b` must be a number.*Sample 1"),
            ([0.0, math.nan, 0.0], "A reward of `b` must be finite, got nan"),
            ([[0.0], 0.0, 0.0], r"`b` must match len\(output_tokens\[0\]\)"),
            ([0.0, 0.0, [math.inf]], "Rewards of `b` must be finite, got inf"),
        ],
    )
    def test_the_one_that_fails_is_named(self, answer, message):
        with pytest.raises(RewardError, match=message):
            self.rewards_of({"a": returning([1.0] * 3), "b": returning(answer)})

    def test_skip_is_of_each(self):
        def raises(outputs):
            if "de" in outputs:
                raise OSError
            return [1.0] * len(outputs)

        found = self.rewards_of({"a": raises, "b": returning([2.0] * 3)}, skip_errors=True)
        np.testing.assert_array_equal(found, [[1.0, np.nan, 1.0], [2.0] * 3])

    def test_only_the_one_that_is_slow_is_left_out(self):
        given = {"a": TestTimeout.slow, "b": returning([2.0] * 3)}
        found = self.rewards_of(given, timeout=0.05, skip_errors=True)
        np.testing.assert_array_equal(found, [[np.nan] * 3, [2.0] * 3])
        with pytest.raises(RewardError, match="`a` took longer"):
            self.rewards_of(given, timeout=0.05)


class TestAsync:
    @staticmethod
    def waits(seconds, reward=1.0, seen=None):
        async def judge(outputs):
            if seen is not None:
                seen.append(list(outputs))
            await asyncio.sleep(seconds)
            return [reward] * len(outputs)

        return judge

    def test_together_after_the_others(self):
        seen = []

        def at_once(outputs):
            seen.append("sync")
            return [0.0] * 3

        many = {str(number): self.waits(0.3, float(number), seen) for number in range(8)}
        started = time.perf_counter()
        found = TestSeveral.rewards_of(many | {"sync": at_once})
        assert time.perf_counter() - started < 1.2  # one after another: 2.4
        assert found == [[float(number)] * 3 for number in range(8)] + [[0.0] * 3]
        assert seen == ["sync"] + [TEXTS.outputs] * 8  # and all rows of one are one call

    def test_one_alone_is_one(self):
        assert rewards_of(self.waits(0.0, 2.0)) == [2.0] * 3

    def test_where_a_loop_runs_already(self):
        async def cell():  # as in a notebook
            return rewards_of(self.waits(0.0))

        assert asyncio.run(cell()) == [1.0] * 3

    def test_what_it_keeps_works_in_the_next_call(self):
        loops = []

        async def judge(outputs):
            loops.append(asyncio.get_running_loop())
            return [1.0] * len(outputs)

        assert rewards_of(judge) == rewards_of(judge)
        assert loops[0] is loops[1]

    @pytest.mark.parametrize("error", [KeyError("de"), SystemExit(0), asyncio.CancelledError("late")])
    def test_a_failure_is_named(self, error):
        async def fails(outputs):
            await asyncio.sleep(0)
            if "de" in outputs:
                raise error
            return [1.0] * len(outputs)

        given = {"a": self.waits(0.0), "b": fails}
        with pytest.raises(RewardError, match=f"`b` raised {type(error).__name__}: .*Sample 1"):
            TestSeveral.rewards_of(given)
        found = TestSeveral.rewards_of(given, skip_errors=True)
        np.testing.assert_array_equal(found, [[1.0] * 3, [1.0, np.nan, 1.0]])

    def test_an_interrupt_is_no_failure(self):
        async def judge(outputs):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            rewards_of(judge, skip_errors=True)
        assert rewards_of(self.waits(0.0)) == [1.0] * 3

    def test_its_own_time_limit_is_a_failure_of_its_own(self):
        async def judge(outputs):
            await asyncio.wait_for(asyncio.sleep(5), 0.01)

        with pytest.raises(RewardError, match="raised TimeoutError"):
            rewards_of(judge, timeout=30.0)

    def test_one_that_waits_too_long_is_cancelled(self):
        cancelled = []

        async def judge(outputs):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        given = {"a": judge, "b": self.waits(0.0)}
        found = TestSeveral.rewards_of(given, timeout=0.1, skip_errors=True)
        np.testing.assert_array_equal(found, [[np.nan] * 3, [1.0] * 3])
        assert rewards_of(self.waits(0.0)) == [1.0] * 3
        assert cancelled
        with pytest.raises(RewardError, match=r"`a` took longer than `train.reward_timeout`, 0\.1 s"):
            TestSeveral.rewards_of(given, timeout=0.1)

    def test_one_that_blocks_the_loop_is_given_up(self):
        async def judge(outputs):
            time.sleep(4)
            return [1.0] * len(outputs)

        started = time.perf_counter()
        assert np.isnan(rewards_of(judge, timeout=0.1, skip_errors=True)).all()
        assert time.perf_counter() - started < 3.0
        assert rewards_of(self.waits(0.0), timeout=0.5) == [1.0] * 3

    @staticmethod
    def holds(seconds, reward=0.0):
        async def judge(outputs):
            await asyncio.sleep(0)
            # Row by row, as a function does that asks a server: none of these tasks is the call itself.
            rows = [asyncio.create_task(ask()) for _ in outputs]
            await asyncio.gather(*rows)
            return [reward] * len(outputs)

        async def ask():
            time.sleep(seconds)

        return judge

    @pytest.mark.parametrize("place", [0, 2])
    def test_one_that_blocks_the_loop_fails_alone(self, place):
        others = {"b": self.waits(0.1, 2.0), "c": self.waits(0.0, 3.0)}
        names = [*others]
        names.insert(place, "a")
        given = {name: others.get(name, self.holds(2.0)) for name in names}
        found = dict(zip(names, TestSeveral.rewards_of(given, timeout=0.4, skip_errors=True), strict=True))
        np.testing.assert_array_equal([found[name] for name in "abc"], [[np.nan] * 3, [2.0] * 3, [3.0] * 3])

    def test_and_is_named_with_the_cause(self):
        with pytest.raises(RewardError, match=r"`a` took longer .* the event loop .* stood still"):
            TestSeveral.rewards_of({"b": self.waits(0.1), "a": self.holds(2.0)}, timeout=0.4)

    def test_each_that_blocks_it_fails(self):
        given = {"a": self.holds(3.0), "b": self.waits(0.1, 2.0), "c": self.holds(3.0)}
        found = TestSeveral.rewards_of(given, timeout=0.4, skip_errors=True)
        np.testing.assert_array_equal(found, [[np.nan] * 3, [2.0] * 3, [np.nan] * 3])

    def test_one_that_waited_behind_it_is_called_once(self):
        async def judge(outputs):
            time.sleep(1.9)

        seen = []
        given = {"a": judge, "b": self.waits(0.0, 2.0, seen)}
        assert TestSeveral.rewards_of(given, timeout=0.4, skip_errors=True)[1] == [2.0] * 3
        time.sleep(0.6)  # until the first loop goes on
        assert len(seen) == 1

    def test_one_that_blocks_it_for_a_while_costs_no_other_and_no_loop(self):
        loops = []

        async def judge(outputs):
            loops.append(asyncio.get_running_loop())
            for _ in range(3):
                await asyncio.sleep(0.02)
            return [2.0] * len(outputs)

        given = {"a": self.holds(0.3, 1.0), "b": judge}
        assert TestSeveral.rewards_of(given, timeout=0.3) == [[1.0] * 3, [2.0] * 3]
        assert rewards_of(judge) == [2.0] * 3
        assert len(set(loops)) == 1

    def test_where_what_blocks_it_belongs_to_no_call_the_cause_is_named(self):
        async def judge(outputs):
            asyncio.get_running_loop().call_soon(time.sleep, 2.0)
            await asyncio.sleep(0)
            return [1.0] * len(outputs)

        given = {"a": judge, "b": self.waits(0.1)}
        with pytest.raises(RewardError, match=r"`a` took longer .* the event loop .* stood still"):
            TestSeveral.rewards_of(given, timeout=0.4)

    def test_one_that_answers_in_time_costs_none_that_it_kept_waiting(self):
        async def judge(outputs):
            time.sleep(0.9)
            return [1.0] * len(outputs)

        seen = []
        given = {"a": judge, "b": self.waits(0.2, 2.0, seen)}
        assert TestSeveral.rewards_of(given, timeout=1.0) == [[1.0] * 3, [2.0] * 3]
        assert len(seen) == 2

    def test_one_that_held_it_and_is_late_is_named_with_the_cause(self):
        async def judge(outputs):
            time.sleep(0.3)
            await asyncio.sleep(5.0)

        with pytest.raises(RewardError, match=r"`a` took longer .* the event loop .* stood still"):
            TestSeveral.rewards_of({"a": judge, "b": self.waits(0.3)}, timeout=0.4)

    def test_a_loop_that_is_given_up_ends_when_it_is_free(self, caplog):
        loops, threads, tasks = [], [], []

        async def judge(outputs):
            loops.append(weakref.ref(asyncio.get_running_loop()))
            threads.append(threading.current_thread())
            tasks.append(asyncio.create_task(asyncio.sleep(30.0)))
            time.sleep(1.6)
            await asyncio.sleep(30.0)

        given = {"a": judge, "b": self.waits(0.0, 2.0)}
        found = TestSeveral.rewards_of(given, timeout=0.1, skip_errors=True)
        np.testing.assert_array_equal(found, [[np.nan] * 3, [2.0] * 3])
        threads[0].join(5.0)
        assert not threads[0].is_alive()
        assert loops[0]().is_closed() and tasks.pop().cancelled()
        gc.collect()
        assert loops[0]() is None, "nothing of it waits for the end of the process"
        assert not [record for record in caplog.records if record.name == "asyncio"]

    def test_nor_is_a_call_of_another_thread_lost_with_it(self):
        found, started = [], threading.Event()

        async def judge(outputs):
            started.set()
            await asyncio.sleep(2.5)
            return [2.0] * len(outputs)

        async def holds(outputs):
            time.sleep(1.6)

        other = threading.Thread(target=lambda: found.append(rewards_of(judge)))
        other.start()
        assert started.wait(5.0)
        assert np.isnan(rewards_of(holds, timeout=0.1, skip_errors=True)).all()
        other.join(10.0)
        assert found == [[2.0] * 3]


class TestFunctions:
    def test_one_or_several(self):
        assert reward_functions(len) == (len,)
        assert reward_functions([len, sum]) == reward_functions((len, sum)) == (len, sum)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (3, "`reward_fn` must be a function or a list of functions, got int"),
            ([], "`reward_fn` must be a function or a list of functions, got an empty list"),
            ([len, "accuracy"], r"`reward_fn\[1\]` must be a function, got str"),
        ],
    )
    def test_anything_else_is_refused(self, given, message):
        with pytest.raises(ValueError, match=message):
            reward_functions(given)

    def test_an_answer_piece_by_piece(self):
        async def stream(outputs):
            yield 1.0

        with pytest.raises(ValueError, match=r"`reward_fn\[0\]` must return its rewards at once"):
            reward_functions([stream])

    def test_names_are_unique(self):
        class Judge:
            def __call__(self, outputs): ...

        def length(outputs): ...

        def length_2(outputs): ...

        given = [length, length_2, length, Judge(), functools.partial(functools.partial(length)), lambda: 0]
        assert unique_names(given) == ("length", "length_2", "length_3", "Judge", "length_4", "lambda")


class TestTimeout:
    @staticmethod
    def slow(outputs):
        time.sleep(1.0)
        return [0.0] * len(outputs)

    def test_a_call_that_takes_too_long(self):
        started = time.perf_counter()
        with pytest.raises(RewardError, match=r"longer than `train.reward_timeout`, 0.05 s"):
            rewards_of(self.slow, timeout=0.05)
        assert time.perf_counter() - started < 0.9

    def test_skip_leaves_the_whole_call_out(self):
        assert np.isnan(rewards_of(self.slow, timeout=0.05, skip_errors=True)).all()

    def test_in_time(self):
        assert rewards_of(returning([1.0] * 3), timeout=30.0) == [1.0] * 3

    def test_exceptions_pass_through_the_thread(self):
        with pytest.raises(RewardError, match="raised KeyError: 'de'"):
            rewards_of(TestExceptions.fails_on("de", []), timeout=30.0)


class TestMetrics:
    @staticmethod
    def metrics_of(metric_fn):
        return call_metric_fn(metric_fn, TEXTS, tokenizer="tokenizer", metadata=METADATA)

    def test_lists_and_numbers(self):
        def metric_fn(samples, topic):
            return {
                "length": [len(sample) for sample in samples],
                "corpus": np.float32(0.5),
                "array": jnp.ones(3),
            }

        found = self.metrics_of(metric_fn)
        assert found == {"length": [2.0, 3.0, 2.0], "corpus": 0.5, "array": [1.0, 1.0, 1.0]}
        assert all(type(value) is float for value in found["length"])

    @pytest.mark.parametrize("error", [KeyError("judge"), SystemExit(0)])
    def test_one_that_raises_is_named(self, error):
        def metric_fn(outputs):
            raise error

        with pytest.raises(RewardError, match=f"`metric_fn` raised {type(error).__name__}: {error}."):
            self.metrics_of(metric_fn)

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ([1.0] * 3, "must return a dictionary.*got list"),
            (None, "got NoneType. Is there no `return`?"),
            ({"a": [1.0]}, r"'a' must be one number a sample \(a list of 3\) or one number, got 1 entries"),
            ({"a": "b"}, "'a' must be one number a sample .*got str"),
            ({"a": [1.0, "b", 2.0]}, "'a' must be one number a sample"),
        ],
    )
    def test_anything_else_is_named(self, answer, message):
        with pytest.raises(ValueError, match=message):
            self.metrics_of(lambda outputs: answer)


class TestRewardMatrix:
    def test_golden(self):
        dense = np.array([1.0, 2.0, 3.0], np.float32)
        placed = to_reward_matrix([5.0, dense, float("nan")], np.array([2, 3, 1]), width=4)
        assert placed.dtype == np.float32
        np.testing.assert_array_equal(placed, [[0, 5, 0, 0], [1, 2, 3, 0], [np.nan] * 4])

    def test_lore_1_9_the_score_sits_on_the_action_that_completes_the_stop_string(self):
        # Two of five sampled tokens are left after the cut: the score is on the second.
        assert to_reward_matrix([1.0], np.array([2]), width=5).tolist() == [[0, 1, 0, 0, 0]]
