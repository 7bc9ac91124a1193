# SPDX-License-Identifier: Apache-2.0
"""Environments of the package verifiers: its rollout, its tools and its rubric, played turn by turn from sampled ids.

An episode is a rollout of the package's own, which waits where it would ask a model over the network. What the policy
wrote is its answer, and the rollout goes on to the next question or to its end. What the environment says in between
is rendered once by the chat template. So ids that were sampled stay as they are.

Environments are those of verifiers 0.2 and 0.3 (`SingleTurnEnv`, `MultiTurnEnv`, `ToolEnv`); 0.4 has none of them.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import functools
import hashlib
import inspect
import json
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from jrl.data.chat.rendering import reply_text
from jrl.data.chat.tool_calls import CallFormat, call_format
from jrl.data.tokenizer import load_tokenizer
from jrl.environments import packages
from jrl.environments.chat import prompt_text
from jrl.environments.packages import Chance

_NUMBERS = ("name", "options", "split", "row", "tokenizer", "template_kwargs")
_ASKED = "asked"
"""Of a row's metadata: digest of the prompt's text."""
_CLOSING_SECONDS = 10
"""What rollouts that are ended have to clean up, all together, at the end of the program."""
_APART = {
    "EnvGroup": "holds several environments: give each one's prompts by itself, and mix those",
    "SandboxEnv": "runs code in a sandbox over the network",
    "SandboxMixin": "runs code in a sandbox over the network",
    "MCPEnv": "asks servers of tools",
    "BrowserEnv": "drives a browser over the network",
    "OpenEnvEnv": "asks a server",
}
"""Classes of the package whose environments need more than this process, and what that is."""


def verifiers_prompts(
    name: str,
    count: int | None = None,
    *,
    tokenizer: str,
    options: Mapping[str, Any] | None = None,
    split: str = "train",
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Rows of an environment's data set as prompts, with the metadata that `Verifiers` begins from.

    Each row's rollout is begun once: a prompt is what it asks first.

    Args:
      name: Of the environment, as `verifiers.load_environment` takes it: a module with `load_environment`.
      count: Of rows, from the first one on; None: all.
      tokenizer: Folder or name of the run's tokenizer, with a chat template.
      options: Arguments of the environment's `load_environment`; what JSON holds.
      split: "train" or "eval".
      template_kwargs: More variables of the template; what JSON holds.
    Returns:
      Dicts with `prompt`, and where the row is found again as `task`.
    Raises:
      ImportError: If verifiers is not installed, or a version without such environments.
      ValueError: If the environment cannot be loaded or played, or the rows are fewer.
    """
    if not isinstance(tokenizer, str):
        raise ValueError(
            f"`tokenizer` must be a folder or a name, got {type(tokenizer).__name__}: worlds load it by themselves."
        )
    if split not in ("train", "eval"):
        raise ValueError(f'`split` must be "train" or "eval", got {split!r}.')
    written = _written("options", options), _written("template_kwargs", template_kwargs)
    rows = _rows(name, written[0], split)
    if count is not None and not 0 < count <= len(rows):
        raise ValueError(f"`count` must be from 1 to the {len(rows)} rows of {name!r}, got {count}.")
    found = []
    for row in range(len(rows) if count is None else count):
        numbers = (name, written[0], split, row, tokenizer, written[1])
        task = dict(zip(_NUMBERS, numbers, strict=True))
        prompt = Verifiers().begun(task)
        found.append({"prompt": prompt, "task": task | {_ASKED: _digest(prompt)}})
    return found


class Verifiers:
    """The world of one episode: a rollout of an environment of verifiers.

    Prompts come from `verifiers_prompts`. The reward is the rubric's, at the end; where a limit of the run ends the
    episode before the environment does, there is none. All is a function of the prompt's metadata, `random` and NumPy's
    generators included, so worlds may live in worker processes.
    """

    def begun(self, task: Mapping[str, Any]) -> str:
        """Begins, and returns the text of the prompt.

        Args:
          task: Metadata of `verifiers_prompts`.
        Raises:
          ValueError: If they are none, or the rollout asks nothing.
        """
        if not isinstance(task, Mapping) or set(_NUMBERS) - task.keys():
            raise ValueError(f"`task` must be metadata of `verifiers_prompts`, got {task!r:.80}.")
        self._kwargs = json.loads(task["template_kwargs"])
        self._env = _environment(task["name"], task["options"])
        self._tokenizer = _tokenizer(task["tokenizer"])
        row = dict(_rows(task["name"], task["options"], task["split"])[task["row"]])
        schemas = _schemas(self._env, row)
        self._format = None if not schemas else _call_format(
            task["tokenizer"], json.dumps(schemas), task["template_kwargs"]
        )  # fmt: skip
        self._chance, self._turn = Chance(task["row"]), 0
        self._client = _client_class()()
        rollout = self._env.rollout(row, self._client, task["tokenizer"], {})
        self._rollout = _loop().start(rollout, self)
        self._asked = self._go_on()
        if self._asked is None:
            raise ValueError(f"{task['name']!r} asks nothing of a model in row {task['row']}.")
        messages = [_plain(message) for message in self._asked]
        return prompt_text(self._tokenizer, messages, tools=schemas, template_kwargs=self._kwargs)

    def reset(self, task: Mapping[str, Any]) -> None:
        """Begins an episode.

        Args:
          task: Metadata of `verifiers_prompts`.
        Raises:
          ValueError: If they are none, or the rollout asks another thing than it asked for the prompt.
        """
        if _digest(self.begun(task)) != task.get(_ASKED):
            raise ValueError(
                "The first question must be a function of the row, and was another one for the prompt. Does "
                "`setup_state` read a clock, the network, or chance that is not of `random` or NumPy?"
            )

    def step(self, text: str, ids: Sequence[int]) -> tuple[str, float, bool]:
        """Answers a turn.

        Args:
          text: What was written.
          ids: All that was sampled in the turn.
        """
        ended = ids[-1] in self._tokenizer.all_special_ids
        before = self._asked
        self._client.give(_answer(self._format, text, ids, self._turn, ended))
        self._turn += 1
        self._asked = self._go_on()
        if self._asked is None:
            return self._end()
        said = self._new_messages(before)
        written = reply_text(self._tokenizer, said, template_kwargs=self._kwargs)
        if ended:
            written = written.removeprefix(self._tokenizer.decode([ids[-1]]))
        return written, 0.0, False

    def _go_on(self) -> Any:
        """Lets the rollout run until it asks; returns the messages that it asks, or None where it is over."""
        with self._chance.used():
            return _loop().run(self._client.asked(self._rollout))

    def _new_messages(self, before: Sequence[Any]) -> list[dict[str, Any]]:
        """What the environment said since it asked last.

        Raises:
          ValueError: If it has changed what was said before, says nothing, or speaks for the policy.
        """
        now, count = [_plain(message) for message in self._asked], len(before)
        roles = [message["role"] for message in now[count:]]
        if now[:count] != [_plain(message) for message in before] or roles[:1] != ["assistant"]:
            raise ValueError(
                "The environment rewrites what was said before (`get_prompt_messages`): the policy cannot go on from "
                "the ids that it sampled."
            )
        if "assistant" in roles[1:] or not roles[1:]:
            raise ValueError(
                f"An environment must answer a turn by other messages than an assistant's, got {roles[1:]}."
            )
        calls, said = now[count].get("tool_calls", []), now[count + 1 :]
        names = {call["id"]: call["function"]["name"] for call in calls}
        for message in said:
            if message["role"] == "tool":
                message["name"] = names.get(message.pop("tool_call_id"), "")
        return said

    def _end(self) -> tuple[str, float, bool]:
        """The last answer: what was said last, and the rubric's reward.

        Raises:
          RuntimeError: If the environment or a reward function failed, of which the package only writes a log.
        """
        state, failures = self._rollout.result(), list[str]()
        if state.get("error") is not None:
            cause = state["error"].__cause__ or state["error"]
            raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause
        with self._chance.used():
            _loop().run(_scored(self._env, state, failures))
        if failures:
            raise RuntimeError("; ".join(failures))
        last = [_plain(message)["content"] for message in state["final_env_response"] or []]
        return "\n".join(last), float(state["reward"]), True


class _Loop:
    """The event loop of all worlds of this process: it runs only while one of them is told something.

    It runs in the thread that asks, or, where a loop runs there already, as in a notebook, in a thread of its own.
    """

    def __init__(self) -> None:
        self._lock, self._loop = threading.RLock(), asyncio.new_event_loop()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="verifiers")
        self._gone: queue.SimpleQueue[asyncio.Task[Any]] = queue.SimpleQueue()

    def start(self, rollout: Coroutine[Any, Any, Any], world: Any) -> asyncio.Task[Any]:
        """A task for a rollout, which ends with its world at the latest."""
        with self._lock:
            task = self._loop.create_task(rollout)
        weakref.finalize(world, self._gone.put, task)
        return task

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs until some work is done, and lets the rollouts of worlds that are gone clean up meanwhile.

        Raises:
          RuntimeError: If a rollout itself plays a world.
        """
        running = _running_loop()
        if running is self._loop:
            work.close()
            raise RuntimeError("A world of verifiers cannot be played by the environment of another one.")
        with self._lock:
            while not self._gone.empty():
                self._gone.get().cancel()
            return self._loop.run_until_complete(work) if running is None else self._run_beside(work)

    def _run_beside(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs in the other thread; an interrupt ends the work there, too."""
        task = self._loop.create_task(work)
        future = self._beside.submit(self._loop.run_until_complete, task)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                self._loop.call_soon_threadsafe(task.cancel)
                wait([future])
            raise

    def close(self) -> None:
        """Ends all rollouts, which have a moment to clean up, at the end of the program."""
        if self._loop.is_running():  # in the other thread, which was interrupted twice
            return
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_CLOSING_SECONDS))
        self._loop.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@functools.cache
def _loop() -> _Loop:
    """That of this process."""
    found = _Loop()
    atexit.register(found.close)
    return found


@functools.cache
def _client_class() -> Any:
    """The class of clients that ask the policy, made once the package is there."""
    packages.verifiers()
    from verifiers.clients import Client

    class PolicyClient(Client):  # type: ignore[misc]
        """Asks the policy: waits until its turn is given."""

        def __init__(self) -> None:
            super().__init__(None)
            self._question: asyncio.Future[Any] | None = None
            self._messages: Any = None
            self._arrived = asyncio.Event()

        async def asked(self, rollout: asyncio.Task[Any]) -> Any:
            """The next question's messages; None where the rollout ends without one, as it does when it fails."""
            arrives = asyncio.ensure_future(self._arrived.wait())
            await asyncio.wait([arrives, rollout], return_when=asyncio.FIRST_COMPLETED)
            if not arrives.done():
                arrives.cancel()
            if rollout.done():
                rollout.result()
                return None
            self._arrived.clear()
            return self._messages

        def give(self, answer: Any) -> None:
            """Answers the last question."""
            assert self._question is not None, "it has asked"
            self._question.set_result(answer)

        async def get_native_response(
            self,
            prompt: Any,
            model: str,
            sampling_args: Any,
            tools: Any = None,
            state: Any = None,
        ) -> Any:
            """Waits for the policy's turn."""
            if self._question is not None and not self._question.done():
                raise ValueError(
                    "An environment must ask one question at a time: an episode is one dialogue."
                )
            self._question, self._messages = asyncio.get_running_loop().create_future(), list(prompt)
            self._arrived.set()
            return await self._question

        def setup_client(self, config: Any) -> None:
            """There is nothing to connect to."""

        async def to_native_tool(self, tool: Any) -> Any:
            """Tools stay what they are: the prompt tells of them."""
            return tool

        async def to_native_prompt(self, messages: Any) -> tuple[Any, dict[str, Any]]:
            """Messages stay what they are."""
            return messages, {}

        async def raise_from_native_response(self, answer: Any) -> None:
            """A turn is never an error."""

        async def from_native_response(self, answer: Any) -> Any:
            """A turn is given as the package has it."""
            return answer

        async def close(self) -> None:
            """There is nothing to close."""

    return PolicyClient


def _answer(format: CallFormat | None, text: str, ids: Sequence[int], turn: int, ended: bool) -> Any:
    """A turn of the policy as a response of the package."""
    from verifiers.types import Response, ResponseMessage, ToolCall, Usage

    message = {"content": text} if format is None else format.read(ids)
    calls = [
        ToolCall(
            id=f"call_{turn}_{place}",
            name=call["function"]["name"],
            arguments=json.dumps(call["function"]["arguments"]),
        )
        for place, call in enumerate(message.get("tool_calls") or [])
    ]
    reason = "length" if not ended else "tool_calls" if calls else "stop"
    return Response(
        id=f"turn_{turn}",
        created=0,
        model="",
        usage=Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=len(ids), total_tokens=len(ids)),
        message=ResponseMessage(
            content=message["content"],
            reasoning_content=message.get("reasoning_content"),
            tool_calls=calls or None,
            finish_reason=reason,
            is_truncated=not ended,
        ),
    )


def _plain(message: Any) -> dict[str, Any]:
    """A message of the package as a chat template takes it.

    Raises:
      ValueError: If it is none, or has more than text.
    """
    content = message.content if message.content is not None else ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    if message.role == "text" or any(part["type"] != "text" for part in parts):
        raise ValueError(
            f"An environment must speak in messages of text, got {message.role!r}: {content!r:.80}."
        )
    found = {"role": message.role, "content": "".join(part["text"] for part in parts)}
    if message.role == "tool":
        found["tool_call_id"] = message.tool_call_id
    if message.role == "assistant" and message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return found


async def _scored(env: Any, state: Any, failures: list[str]) -> None:
    """Lets the rubric score a rollout that is over; adds what its functions raised to `failures`."""
    if env.score_rollouts:
        await _with_notes(env.rubric, failures).score_group([state])
    else:
        await env.rubric.dummy_score_group([state])
    await env.rubric.cleanup(state)


def _with_notes(rubric: Any, failures: list[str]) -> Any:
    """A rubric whose functions note what they raise: the package makes a reward of 0 of it."""
    found = copy.copy(rubric)
    if hasattr(found, "rubrics"):
        found.rubrics = [_with_notes(one, failures) for one in found.rubrics]
    found.funcs = [_noting(function, failures) for function in found.funcs]
    return found


def _noting(function: Callable[..., Any], failures: list[str]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def noting(*args: Any, **keywords: Any) -> Any:
        try:
            found = function(*args, **keywords)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:  # of the user's function
            failures.append(f"The rubric's `{noting.__name__}` raised {type(error).__name__}: {error}")
            raise

    return noting


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _written(name: str, given: Mapping[str, Any] | None) -> str:
    try:
        return json.dumps(dict(given or {}), sort_keys=True)
    except TypeError as error:
        raise ValueError(f"`{name}` must hold what JSON does: {error}.") from error


@functools.lru_cache(maxsize=16)
def _environment(name: str, options: str) -> Any:
    """An environment of the package.

    Raises:
      ValueError: If it cannot be loaded, or not be played.
    """
    package = packages.verifiers()
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            f"{name!r} must be loaded by the main thread, as `verifiers_prompts` does: verifiers sets signal handlers."
        )
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        env = package.load_environment(name, **json.loads(options))
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"`name` or `options` are of no environment that verifiers loads: {error}"
        ) from error
    finally:  # a run has handlers of its own
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
    reason = next(_reasons(package, env), None)
    if reason is not None:
        raise ValueError(f"The environment {name!r} cannot be played here: {reason}.")
    return env


def _reasons(package: Any, env: Any) -> Iterator[str]:
    """Why an environment cannot be played, if it cannot."""
    kinds = {kind.__name__ for kind in type(env).__mro__}
    yield from (f"it {what}" for kind, what in _APART.items() if kind in kinds)
    if not isinstance(env, package.MultiTurnEnv):
        yield f"it must be a `SingleTurnEnv`, `MultiTurnEnv` or `ToolEnv`, got {type(env).__name__}"
        return
    if env.message_type != "chat":
        yield f"its `message_type` must be 'chat', got {env.message_type!r}"
    if env.timeout_seconds is not None:
        yield "its `timeout_seconds` would count the time that the policy samples; use `isolated_environment`"
    if any(isinstance(one, package.JudgeRubric) for one in _leaves(env.rubric)):
        yield "its rubric asks a judge over the network; give a reward model of jrl as `reward_fn` instead"
    if env.requires_group_rollouts or env.provides_advantages:
        yield "its rubric compares the samples of a prompt; give such a function as `reward_fn` instead"


def _leaves(rubric: Any) -> Iterator[Any]:
    yield rubric
    for one in rubric.rubrics if hasattr(rubric, "rubrics") else ():
        yield from _leaves(one)


@functools.lru_cache(maxsize=16)
def _rows(name: str, options: str, split: str) -> Any:
    """The data set of an environment.

    Raises:
      ValueError: If it has none for the split.
    """
    env = _environment(name, options)
    found = env.build_dataset() if split == "train" else env.build_eval_dataset()
    if found is None:
        raise ValueError(f"{name!r} has no data set for `split` {split!r}.")
    return found


@functools.lru_cache(maxsize=16)
def _tokenizer(path: str) -> Any:
    return load_tokenizer(path)


@functools.lru_cache(maxsize=64)
def _call_format(path: str, schemas: str, template_kwargs: str) -> CallFormat:
    return call_format(_tokenizer(path), json.loads(schemas), json.loads(template_kwargs))


def _schemas(env: Any, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """JSON schemas of a row's tools."""
    info = row.get("info")
    info = json.loads(info) if isinstance(info, str) else info
    own = info.get("tool_defs") if isinstance(info, Mapping) else None
    tools = env.tool_defs if own is None else own
    described = [tool if isinstance(tool, Mapping) else tool.model_dump() for tool in tools or []]
    return [
        {
            "type": "function",
            "function": {name: tool[name] for name in ("name", "description", "parameters")},
        }
        for tool in described
    ]
