# SPDX-License-Identifier: Apache-2.0
"""Memory and communication of a run on every device of a mesh, from shapes alone: no device need be here.

State, cache and activations are the shapes that JAX itself gives (`jax.eval_shape`), split as `jrl.mesh` splits them.
What the collectives send is arithmetic: docs/scaling.md derives it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jrl.mesh import (
    EXPERT,
    AbsentDevice,
    experts_parts,
    logits_parts,
    path_name,
    platform,
    rows_of_device,
    rows_parts,
    tree_shardings,
)
from jrl.models.adapters.virtual_tokens import PREFIX, PROMPT
from jrl.models.attention import begins_by_kernel
from jrl.models.config import Mamba1, TransformerConfig
from jrl.models.cost import activation_bytes, cache_bytes, format_bytes
from jrl.models.fused_attention import choose_attention
from jrl.models.layers import ROUNDED, TABLES, moves_table
from jrl.models.score_blocks import ScoreBlocks
from jrl.models.seq2seq_config import Seq2SeqConfig
from jrl.ops.chunks import chunk_shape, positions_of
from jrl.rollout.episodes import TAIL_SHARE
from jrl.rollout.generate import PREFILL_TOKENS, prefill_columns, prefill_rows
from jrl.trainers.config.method import Footprint, entries, footprint_of
from jrl.trainers.config.registry import get_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loggers.description import describe_parameters
from jrl.trainers.plan.model_part import LanguageShapes, ModelShapes, kept_reference, model_part
from jrl.trainers.programs import optimizer_of, placed_bytes, planned_settings
from jrl.typing import ModelInputs

Bytes = dict[str, int]
SAMPLING_ON_CHIP_BYTES = {"TPU v5": 28 << 20, "TPU v5 lite": 72 << 20, "TPU v6 lite": 84 << 20}
STEP_ON_CHIP_BYTES = {"TPU v5": 8 << 20, "TPU v5 lite": 84 << 20, "TPU v6 lite": 84 << 20}
"""On-chip memory in which a sampling call, or an optimizer step, has arrays when it takes the most, by kind of device.

Nothing is reserved for what lies there. Fitted to docs/compiled.md: chips have 64 MiB (v5p) and 128 MiB, kernels work
on a part of it, and some arrays lie in both memories at once."""


@dataclass(frozen=True)
class RunPlan:
    """Memory and traffic of one device.

    Attributes:
      model: What it is of.
      mesh: Sizes of the axes.
      microbatches: Of one optimizer step.
      held: Bytes that lie there all the time.
      learning: Bytes that an optimizer step takes beside them, at each of its moments that may be the fullest.
      sampling: Bytes that a sampling call takes beside them; empty where the method does not sample.
      step_traffic: Bytes that an optimizer step sends, by axis and kind.
      token_traffic: Bytes that sampling sends: once a call, and for each token.
      score_traffic: Bytes that scoring sends: in PPO a call, which scores a chunk; in DPO an optimizer step, where the
        reference is asked in each.
      uncounted: What is not counted, in words; "" where all is.
    """

    model: str
    mesh: dict[str, int]
    microbatches: int
    held: Bytes
    learning: dict[str, Bytes]
    sampling: Bytes
    step_traffic: Bytes
    token_traffic: Bytes
    score_traffic: Bytes
    uncounted: str = ""

    @property
    def is_whole(self) -> bool:
        """True where the plan counts all that a run takes."""
        return not self.uncounted

    @property
    def fullest(self) -> str:
        """The moment of an optimizer step that takes the most; what lies in on-chip memory counts for it."""
        return max(
            self.learning, key=lambda moment: sum(max(size, 0) for size in self.learning[moment].values())
        )

    @property
    def step_bytes(self) -> int:
        """Bytes that an optimizer step takes beside what is held."""
        return sum(self.learning[self.fullest].values())

    @property
    def program_bytes(self) -> dict[str, int]:
        """Bytes of a call beside what is held, by the program's name; {} where not all is counted."""
        sampling = {"sample": sum(self.sampling.values())} if self.sampling else {}
        return {"update": self.step_bytes, **sampling} if self.is_whole else {}

    @property
    def total(self) -> int:
        """Bytes of a device when it has the most, of what is counted."""
        return sum(self.held.values()) + max(self.step_bytes, sum(self.sampling.values()))

    def table(self, hbm_bytes: int | None = None) -> str:
        """Everything in lines; with the memory of a device, whether it fits."""
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        lines = [f"{self.model} on {axes}; a step has {self.microbatches} microbatches", ""]
        for title, found in (
            ("held on each device", self.held),
            (f"and in an optimizer step, {self.fullest}", self.learning[self.fullest]),
            ("or in a sampling call", self.sampling),
            ("sent by each device in an optimizer step", self.step_traffic),
            ("sent by each device in sampling", self.token_traffic),
            ("sent by each device in scoring", self.score_traffic),
        ):
            is_sent = title.startswith("sent")
            if found and (not is_sent or any(found.values())):  # one device sends nothing
                lines.append(title)
                lines += [f"  {name:<44}{format_bytes(size):>12}" for name, size in found.items()]
        if not self.is_whole:
            lines.append(f"not counted: {self.uncounted}; --compile says them")
        bound = "most" if self.is_whole else "least"
        lines.append(f"{f'memory of each device, at {bound}':<46}{format_bytes(self.total):>12}")
        if hbm_bytes is not None:
            fits = "fits" if self.is_whole else "may fit"
            verdict = fits if self.total <= hbm_bytes else "does not fit"
            lines.append(f"{verdict} into {format_bytes(hbm_bytes)} ({self.total / hbm_bytes:.0%})")
        return "\n".join(lines)


def plan_run(config: TRLConfig, mesh: AbstractMesh) -> RunPlan:
    """The plan of a recipe; of its model only the config files are read.

    Args:
      config: The run's configuration; its own `train.mesh` is not looked at.
      mesh: Where it would run.
    Raises:
      ValueError: If the model cannot be what the configuration asks for, or the method is none that is planned.
    """
    config.validate()
    # What a model does on a kind of device it asks of the mesh in force.
    is_imagined = isinstance(mesh.abstract_device, AbsentDevice)
    with jax.sharding.use_abstract_mesh(mesh) if is_imagined else contextlib.nullcontext():
        return _plan(config, mesh)


def _plan(config: TRLConfig, mesh: AbstractMesh) -> RunPlan:
    if config.train.sampling_mesh is not None:
        raise ValueError(
            "`train.sampling_mesh` must be None to be planned: a plan is of one mesh. Plan each with the devices that "
            f"it has, got {config.train.sampling_mesh}."
        )
    footprint = footprint_of(config)
    if footprint is None:
        planned = [entry.config.__name__ for entry in entries().values() if entry.recipe or entry.footprint]
        raise ValueError(
            f"`method.name` must be one of {planned} to be planned, got {type(config.method).__name__}: what else it "
            "holds is not known."
        )
    part = model_part(config, mesh, footprint, attends_as_configured=mesh.abstract_device is not None)
    if part.layers is None:
        return _plan_of_arrays(_Held(config, footprint, part))
    run = _Run(config, footprint, part.layers)
    step, sampling = _step_traffic(run) | _reference_traffic(run), _sampling(run)
    return RunPlan(
        model=run.model,
        mesh=dict(mesh.shape),
        microbatches=run.microbatches,
        held=_held(run),
        learning=_learning(run),
        sampling=sampling,
        step_traffic={name: run.microbatches * size for name, size in step.items()},
        token_traffic=_token_traffic(run),
        score_traffic=_scoring_traffic(run),
        uncounted=_uncounted(run.part.lm.config) if sampling else "",
    )


def _uncounted(config: TransformerConfig | Seq2SeqConfig) -> str:
    """What a sampling call takes that `_prefill_bytes` does not know of."""
    if isinstance(config, Seq2SeqConfig):
        return ""
    is_plain = all(layer.experts is None and layer.mixer is None for layer in config.layers)
    return "" if is_plain else "activations of experts and mixers that read the prompts"


def _plan_of_arrays(run: _Held) -> RunPlan:
    """The plan of a model whose layers are not counted: of arrays that its programs are given and return."""
    with jax.sharding.use_abstract_mesh(run.mesh):
        # Nothing is compiled: sizes are all that is asked of the mesh.
        mesh = cast(Mesh, run.mesh)
        trainer = get_trainer(run.config.train.trainer)
        found = trainer.programs(run.config, run.part, mesh)
        programs = {program.name: program for program in found}
        update, sample = programs["update"], programs.get("sample")
        made = None if sample is None else sample.result()
        kept = trainer.activations(run.config, run.part, mesh)
    held = _held(run)
    known = held["parameters that train"] + held["optimizer"]
    # An average of the weights, a loss scale, counters.
    held["rest of the state"] = placed_bytes(update.arguments[0]) - known
    return RunPlan(
        model=run.model,
        mesh=dict(run.mesh.shape),
        microbatches=run.microbatches,
        held=held,
        learning={
            "of what is counted": {
                "gradients": _bytes(run.stepped, run.mesh),
                "batch": placed_bytes(update.given),
                **({} if kept is None else {"activations of a microbatch": kept}),
            }
        },
        sampling={}
        if sample is None
        else {"prompts": placed_bytes(sample.given), "samples": placed_bytes(made)},
        step_traffic={},
        token_traffic={},
        score_traffic={},
        uncounted=trainer.unplanned,
    )


@dataclass(frozen=True)
class _Held:
    """What a run to be planned holds.

    Attributes:
      config: Its configuration.
      footprint: What its algorithm holds.
      part: Its model.
    """

    config: TRLConfig
    footprint: Footprint
    part: ModelShapes

    @property
    def model(self) -> str:
        """Name and size."""
        size = describe_parameters(self.stepped, self.part.frozen)
        return f"{self.part.name}, {size}; computed in {jnp.dtype(self.part.dtype)}"

    @property
    def mesh(self) -> AbstractMesh:
        return self.part.mesh

    @property
    def stepped(self) -> Any:
        """Parameters that an optimizer moves."""
        return {name: tree for name, tree in self.part.params.items() if name != "target_q_heads"}

    @property
    def everything(self) -> Any:
        """All parameters of the model."""
        return {**self.part.params, **self.part.frozen}

    @functools.cached_property
    def reference(self) -> Any:
        """The reference's own parameters."""
        return kept_reference(self.part, self.footprint)

    @property
    def rows(self) -> int:
        """Rows of a microbatch."""
        return self.config.train.rows_per_pass * self.footprint.rows_per_sample

    @property
    def splits_rows(self) -> bool:
        """True where a device computes a part of a microbatch: what devices find is added up, whole, then scattered.

        Where all compute all rows, each makes its own part of a gradient.
        """
        return rows_of_device(self.rows, self.mesh) < self.rows

    @property
    def microbatches(self) -> int:
        """Of an optimizer step."""
        passes = -(-self.config.train.batch_size // self.config.train.rows_per_pass)
        return passes * self.footprint.passes_per_sample


@dataclass(frozen=True)
class _Run(_Held):
    """A run of a language model to be planned, or of a classifier with its layers."""

    part: LanguageShapes

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.config.train.seq_length

    @property
    def has_context(self) -> bool:
        """True where an encoder reads the prompt."""
        return self.part.lm.family.kind == "seq2seq"

    @functools.cached_property
    def as_read(self) -> dict[str, Any]:
        """Shapes of all parameters as products read them: kernels in the dtype of the computation."""
        read = dict(jax.eval_shape(self.part.policy.rounded, self.everything))
        if ROUNDED in read["embed"]:
            config = self.part.lm.config
            unread = {"embedding"} if config.rounds_embeddings else {ROUNDED} if "lm_head" in read else set()
            read["embed"] = {name: leaf for name, leaf in read["embed"].items() if name not in unread}
        if "layer_embed" in read:  # no head, and rounded wherever it is looked up
            table = read["layer_embed"]
            read["layer_embed"] = {ROUNDED: table[ROUNDED]} if ROUNDED in table else table
        return read

    @functools.cached_property
    def platform(self) -> str | None:
        """Of the devices; None: it is not known."""
        with jax.sharding.use_abstract_mesh(self.mesh):
            return platform() if self.mesh.abstract_device is not None else None

    @property
    def device_kind(self) -> str:
        """Of the devices; "" where it is not known."""
        device = self.mesh.abstract_device
        return "" if device is None else device.device_kind

    @property
    def layers(self) -> list[str]:
        """Names of the layers, those of an encoder among them."""
        return [name for name in self.everything if name.startswith(("layers_", "encoder_layers_"))]

    @property
    def tables(self) -> list[str]:
        """Names of the tables of tokens."""
        return [name for name in TABLES if name in self.everything]

    def moves_table(self, name: str) -> bool:
        """True where an update embeds with whole rows of a table: with a frozen one all its rows at once."""
        rows = self.rows if name in self.stepped else self.footprint.update_rows or self.rows
        num_rows, width = self.everything[name]["embedding"].shape
        with jax.sharding.use_abstract_mesh(self.mesh):
            return moves_table((rows, self.length), num_rows, width, "vocab")

    @functools.cached_property
    def sampled(self) -> tuple[int, int]:
        """Bytes of the parameters that a sampling call makes of those that lie there, and those that it gathers."""
        return _sampled(self.part, self.everything, self.as_read, is_tpu=self.platform == "tpu")


def _held(run: _Held) -> Bytes:
    """Bytes that lie on a device all the time."""
    ahead = run.config.train.rollouts_ahead
    # Those of the iterations on their way, and that before the update, whose rollouts come next.
    copies = ahead + 1 if ahead else 0
    optimizer = jax.eval_shape(optimizer_of(run.config).init, run.stepped)
    return {
        "parameters that train": _bytes(run.part.params, run.mesh),
        "optimizer": _bytes(optimizer, run.mesh),
        "frozen parameters": _bytes(run.part.frozen, run.mesh),
        "reference's own parameters": _bytes(run.reference, run.mesh),
        **({} if not copies else {"policies that sample ahead": copies * _bytes(run.part.params, run.mesh)}),
    }


def _learning(run: _Run) -> dict[str, Bytes]:
    """Bytes that an optimizer step takes beside them, at each of its moments that may be the fullest."""
    on_chip = STEP_ON_CHIP_BYTES.get(run.device_kind, 0)
    return {moment: _without(on_chip, sizes) for moment, sizes in _moments(run).items()}


def _without(on_chip: int, sizes: Bytes) -> Bytes:
    """The bytes of a moment, less those that lie in so many bytes of on-chip memory."""
    there = min(on_chip, sum(sizes.values()))
    return {**sizes, "what of these lies in on-chip memory": -there} if there else sizes


def _moments(run: _Run) -> dict[str, Bytes]:
    """Bytes of the moments of an optimizer step.

    A kernel's gradient is whole over fsdp until it is scattered. That of a table comes from each of its uses: it embeds
    what each stack reads and, where it is tied, makes logits. Of a lookup it is whole only where the table moves.
    """
    kept, recomputed = _activations(run)
    layers = {name: run.as_read[name] for name in run.layers}
    # Where all devices compute all rows, each multiplies its own part of a layer's kernels.
    whole = {name: _bytes(tree, run.mesh, whole=run.splits_rows) for name, tree in layers.items()}
    summed = run.stepped
    if run.platform == "tpu" and run.microbatches == 1:
        # Those of layers stay in the stacks that products make them in.
        summed = {name: tree for name, tree in summed.items() if name not in layers}
    sums = {"gradients, summed over microbatches": _bytes(summed, run.mesh)}
    forward = {
        # A single microbatch has none before its backward pass.
        **(sums if run.microbatches > 1 else {}),
        "output of the frozen layers, all rows": _trunk_bytes(run),
        **_slots_ahead(run, "slots that sample meanwhile", max(1, run.footprint.slots_beside)),
    }
    read, made = _read_layers(run)
    at_work = {
        **forward,
        "kernels of layers as products read them": read,
        **_own_vocabulary(run),
        "activations of a microbatch": kept,
    }
    moved = {name: run.as_read[name] for name in run.tables if run.moves_table(name)}
    tables = _bytes(moved, run.mesh, whole=True)
    gradients = {name: _table_gradient(run, name, whole=name in moved) for name in run.tables}
    makes_logits = "lm_head" not in run.everything and run.footprint.reads_logits
    gradients["embed"] *= 1 + run.has_context + makes_logits
    found = {
        "while it embeds": {**forward, "tables of embeddings as they are read, whole": tables},
        "in a layer": {
            **at_work,
            **sums,
            "gradients of these, as products make them": made,
            "activations of the layer computed again": recomputed,
            "kernels of a layer as they are read, whole": max(whole.values())
            if run.mesh.shape["fsdp"] > 1
            else 0,
            "gradient of a layer, whole": max(
                (whole[name] for name in layers if name in run.stepped and run.splits_rows), default=0
            ),
        },
        "in the gradient of embeddings": {
            **forward,
            **sums,
            "gradients of the table's uses": sum(gradients.values()),
        },
    }
    if run.footprint.reads_logits:
        found |= {moment: {**at_work, **sizes} for moment, sizes in _logits(run).items()}
    # GPUs that all compute all rows make their own parts of it, which is no moment of its own.
    if "v_head" in run.stepped and run.footprint.reads_logits and (run.splits_rows or run.platform != "gpu"):
        found["in the gradient of the value head"] = {**at_work, **_value_head(run)}
    if "q_heads" in run.stepped:
        found["while it reads Q values"] = {**at_work, **_q_head(run)}
    return found


def _q_head(run: _Run) -> Bytes:
    """Bytes of ILQL's Q heads, which are read one after the other, in float32.

    TPUs multiply in bfloat16 and gather that, where the kernel of the next head lies beside that of one: as many bytes.
    Of target heads they lay out their own part of the last kernel anew, so that the columns of actions are its rows.
    """
    heads = run.stepped["q_heads"]
    one = {"q_heads": {"0": heads["0"]}}
    last_kernels = {
        "q_heads": {name: {"out": {"kernel": head["out"]["kernel"]}} for name, head in heads.items()}
    }
    logits = 4 * _num_actions(run) * run.part.lm.config.padded_vocab_size // run.mesh.shape["tensor"]
    limit = run.config.train.logprob_chunk_bytes
    if (1 + 2 * len(heads)) * logits <= limit:
        values = {"logits and Q values": (1 + len(heads)) * logits}
    elif run.mesh.shape["fsdp"] > 1:  # while a kernel is whole nothing else is
        values = {}
    else:
        values = {"a piece of Q values, and its gradient": 2 * min(limit, logits // 2)}
    return {
        "a Q head as it is read, whole": _bytes(one, run.mesh, whole=True)
        if run.mesh.shape["fsdp"] > 1
        else 0,
        "its gradient": _bytes(one, run.mesh, whole=run.splits_rows),
        **(
            {"last kernels of target heads, laid out anew": _bytes(last_kernels, run.mesh)}
            if run.platform == "tpu" and _looks_up(heads["0"])
            else {}
        ),
        **values,
    }


def _looks_up(head: Any) -> bool:
    """True where the values of actions are columns that are looked up: the hidden layer is narrower than the result."""
    width, num_columns = head["out"]["kernel"].shape
    return width < num_columns


def _num_actions(run: _Run) -> int:
    """Actions of ILQL's microbatch on a device; the first token of a row is none."""
    return rows_of_device(run.rows, run.mesh) * (run.length - 1)


def _logits(run: _Run) -> dict[str, Bytes]:
    """Bytes that a step takes for the logits of a microbatch and for the kernel that makes them, forward and backward.

    Logits above `train.logprob_chunk_bytes` are made in pieces, and once more for the gradient: there the gradients of
    the pieces before lie beside those of a piece.
    """
    read, tensor = run.as_read, run.mesh.shape["tensor"]
    head = _vocabulary(run)
    # A tied table that nothing changes stays as it was gathered, beside its rounded copy: to embed, and on GPUs to be
    # rounded. TPUs round it first.
    if "embed" in head and "embed" not in run.stepped:
        stays = run.moves_table("embed") or run.platform != "tpu"
        head = {"embed": read["embed"]} if stays else head
    window = run.footprint.window or run.length
    positions = rows_of_device(run.rows, run.mesh) * window
    vocab_size = run.part.lm.config.padded_vocab_size
    logits = 4 * positions * vocab_size // tensor
    most = _piece_bytes(run, window, vocab_size) if logits > run.config.train.logprob_chunk_bytes else logits
    # GPUs that all compute all rows multiply their own parts; TPUs gather it all the same.
    is_whole = run.splits_rows or run.platform != "gpu"
    kernel = {"kernel of the vocabulary as it is read, whole": _bytes(head, run.mesh, whole=is_whole)}
    name = next(iter(head))
    gradient = {"gradient of the kernel, whole": _table_gradient(run, name)}
    itemsize = jnp.dtype(run.part.dtype).itemsize
    as_read = {"gradient of logits, as products read it": logits * itemsize // 4}
    # What XLA's schedules for TPUs and GPUs show; elsewhere all of it may lie together.
    piece = {"gradient of a piece's logits, as products read it": most * itemsize // 4}
    if logits > most and run.platform in ("gpu", "tpu"):
        # A piece's logits are there until their gradient is rounded; the sum over pieces is part of the product.
        moments = {"in the gradient of logits": kernel | gradient | {"logits of a piece": most} | piece}
    elif logits > most:
        backward = kernel | {
            "logits of a piece, their gradient, and it laid out anew": 3 * most,
            "gradient of the kernel, whole: a piece's, and those before": 2 * _table_gradient(run, name),
        }
        moments = {"in the gradient of logits": backward}
    elif run.platform == "gpu":
        # The gradient of what it multiplies comes first, and the kernel is not read again. For a table the gradient of
        # logits is rounded once: into an array of its own, beside the one that it is made of.
        rounded = {"logits": logits} if "lm_head" not in read and itemsize < 4 else {}
        moments = {
            "in the gradient of logits": kernel | as_read | rounded,
            "in the gradient of the vocabulary's kernel": gradient | as_read,
            "while that is scattered": gradient
            | {"a device's part of it": _table_gradient(run, name, whole=False)},
        }
    else:
        moments = {"in the gradient of logits": kernel | as_read | gradient}
    return {"while it reads logits": kernel | {"logits": most}, **moments}


def _vocabulary(run: _Run) -> dict[str, Any]:
    """Shapes of the kernel that makes logits, as products read it: of the head, or of a tied table."""
    read = run.as_read
    if "lm_head" in read:
        return {"lm_head": read["lm_head"]}
    table = ROUNDED if ROUNDED in read["embed"] else "embedding"
    return {"embed": {table: read["embed"][table]}}


def _own_vocabulary(run: _Run) -> Bytes:
    """Bytes of a device's part of that kernel, of which TPUs in low precision keep a copy beside the gathered one."""
    in_low_precision = jnp.dtype(run.part.dtype).itemsize < 4
    if (
        run.platform != "tpu"
        or not (run.footprint.reads_logits and in_low_precision)
        or run.mesh.shape["fsdp"] == 1
    ):
        return {}
    return {"a device's part of the vocabulary's kernel": _bytes(_vocabulary(run), run.mesh)}


def _value_head(run: _Run) -> Bytes:
    """Bytes of the value head and its gradient in float32, beside the vocabulary's kernel; TPUs read it in bfloat16."""
    head = {"v_head": run.stepped["v_head"]}
    read = _bytes(head, run.mesh, whole=True)
    return {
        "kernel of the vocabulary as it is read, whole": _bytes(_vocabulary(run), run.mesh, whole=True),
        "value head as it is read, whole": read // 2 if run.platform == "tpu" else read,
        "gradient of the value head": _bytes(head, run.mesh, whole=run.splits_rows),
    }


def _piece_bytes(run: _Run, width: int, vocab_size: int) -> int:
    """Bytes of a device's logits of one piece, of which pieces of equal size are made."""
    most = run.config.train.logprob_chunk_bytes
    with jax.sharding.use_abstract_mesh(run.mesh):
        parts = logits_parts(run.rows, vocab_size)
        positions = positions_of(most, vocab_size=vocab_size, num_parts=parts)
    rows, columns = chunk_shape(num_rows=run.rows, width=width, positions=positions)
    return 4 * rows * columns * vocab_size // parts


def _table_gradient(run: _Run, name: str, *, whole: bool = True) -> int:
    """Bytes of the gradient of a table or a head, whole over fsdp or split; 0 where it does not train."""
    if name not in run.stepped:
        return 0
    return _bytes({name: run.stepped[name]}, run.mesh, whole=whole and run.splits_rows)


def _trunk_bytes(run: _Run) -> int:
    """Bytes of what the frozen layers make of all rows, where an update computes it once."""
    rows = run.footprint.update_rows
    if not rows:
        return 0

    def row(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, run.length), dtype)  # type: ignore[no-untyped-call]

    context = (row(jnp.int32), row(jnp.bool_)) if run.has_context else (None, None)
    inputs = ModelInputs(row(jnp.int32), row(jnp.bool_), None, *context)
    trunk = jax.eval_shape(run.part.policy.trunk, run.part.frozen, inputs)
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(trunk))
    return whole * rows_of_device(rows, run.mesh) // rows


def _read_layers(run: _Run) -> tuple[int, int]:
    """Bytes of layers' kernels as products read them, and of the gradients of those that train, as products make them.

    On TPUs, and where the platform is not known, these are the stacks of equal layers that share a body; TPUs pick one
    frozen layer at a time. GPUs round the kernels of layers that train, in low precision. A CPU reads what is trained.
    """
    if run.platform == "cpu":
        return 0, 0
    layers = {name: _bytes({name: run.as_read[name]}, run.mesh) for name in run.layers}
    frozen = [size for name, size in layers.items() if name not in run.stepped]
    trained = sum(layers.values()) - sum(frozen)
    if run.platform == "gpu":
        return trained if jnp.dtype(run.part.dtype).itemsize < 4 else 0, trained
    return trained + (max(frozen, default=0) if run.platform == "tpu" else sum(frozen)), trained


def _sampling(run: _Run) -> Bytes:
    """Bytes that a sampling call takes beside them."""
    footprint = run.footprint
    rows = footprint.slots or footprint.sampling_rows or footprint.evaluation_rows
    if not rows:
        return {}
    if footprint.slots and run.has_context:
        raise ValueError(
            f"`method.rollout_slots` must be null for a seq2seq model, got {footprint.slots}, and it can play no "
            "environment: its rows all write the same column of the cache."
        )

    on_chip = SAMPLING_ON_CHIP_BYTES.get(run.device_kind, 0)
    cache, reading = _cache(run, rows), _prefill_bytes(run, rows)
    moves = bool(footprint.slots) and rows_of_device(rows, run.mesh) == rows
    if run.has_context:
        # The encoder has read the prompts before there is a cache.
        sizes = {
            "parameters, as sampling reads them": run.sampled[0],
            "cache, or activations of the encoder": max(cache, reading),
        }
        return _without(on_chip, sizes)
    is_split = run.mesh.shape["fsdp"] > 1
    ahead = _slots_ahead(run, "slots of the other rollouts ahead", footprint.slots_beside)
    gathering = {
        "parameters, as sampling reads them": run.sampled[0],
        # The compiler lays out anew what it has gathered.
        "the largest of them once more, while it is laid out": max(
            _leaf_bytes(run.as_read, run.mesh, whole=True)
        )
        if is_split
        else 0,
        **ahead,
    }
    reading_prompts = {
        "parameters, as sampling reads them": run.sampled[0],
        "cache": cache,
        **_cache_apart(run, rows, cache),
        # Fewer hold prompts that are read before they are put into slots.
        **({"slots of the last rows": _cache(run, -(-rows // TAIL_SHARE))} if moves else {}),
        **(
            {"more of them, which read what worlds say": _picked(run, rows)}
            if moves and footprint.plays
            else {}
        ),
        **ahead,
        "activations of a layer that reads the prompts": reading,
    }
    fullest = max(gathering, reading_prompts, key=lambda moment: sum(moment.values()))
    return _without(on_chip, fullest)


def _cache(run: _Run, rows: int) -> int:
    """Bytes of the cache of some rows."""
    return cache_bytes(
        run.part.policy,
        run.part.params,
        run.part.frozen,
        mesh=run.mesh,
        rows=rows,
        length=run.length,
        has_context=run.has_context,
    )


def _picked(run: _Run, rows: int) -> int:
    """Bytes by which the slots that read together are more than the last rows; all of them read in place."""
    most = max(count for count in (4**power for power in range(16)) if count < max(rows, 2))
    return max(_cache(run, most) - _cache(run, -(-rows // TAIL_SHARE)), 0)


def _slots_ahead(run: _Run, name: str, collections: int) -> Bytes:
    """Bytes of the slots of some collections that are on their way, each with the weights as it reads them."""
    slots = run.footprint.slots
    if not slots or not collections or not run.config.train.rollouts_ahead:
        return {}
    return {name: collections * (_cache(run, slots) + run.sampled[0])}


def _rows_read_together(run: _Run, rows: int) -> int:
    """Rows of a device whose prompts are read at a time."""
    with jax.sharding.use_abstract_mesh(run.mesh):
        return prefill_rows(rows, _prompt_width(run)) or rows_of_device(rows)


def _prompt_width(run: _Run) -> int:
    """Tokens of a prompt, beside which a row has as many new ones as a sampling call writes."""
    new_tokens = run.footprint.window
    if not new_tokens:  # an update that reads all logits says nothing of it
        steers = run.footprint.num_q_heads > 0
        new_tokens = planned_settings(run.part, run.config.method.gen_kwargs, steers=steers).max_new_tokens
    return max(run.length - new_tokens, 1)


def _cache_apart(run: _Run, rows: int, cache: int) -> Bytes:
    """Bytes of the cache of a layer that some rows of each device fill before it is put beside that of the others."""
    own, together = rows_of_device(rows, run.mesh), _rows_read_together(run, rows)
    if run.footprint.slots or together == own:
        return {}
    layers = run.part.lm.config.num_layers
    return {"a layer's cache of the rows that read their prompts": cache * together // own // layers}


def _prefill_bytes(run: _Run, rows: int) -> int:
    """Bytes at work where prompts are read, a part of them at a time: the inside of an MLP, or attention.

    Attention has queries, keys, values and result. A kernel has them once more, as it takes them: turned, or in whole
    blocks. Where none serves there are, of a block of rows, the scores in float32 beside the weights that they become.
    """
    config, tensor = run.part.lm.config, run.mesh.shape["tensor"]
    itemsize = jnp.dtype(run.part.dtype).itemsize
    tokens = rows_of_device(rows, run.mesh) * run.length
    mlp_width = 2 * max(_mlp_widths(config)) // tensor + 2 * run.part.lm.feature_width
    if not isinstance(config, TransformerConfig):  # an encoder reads all rows at once
        return tokens * mlp_width * itemsize
    tokens = min(tokens, PREFILL_TOKENS)
    mlp_width += config.num_layers * (config.layer_input_width or 0)
    heads = (
        (config.num_heads + (layer.num_kv_heads or config.num_kv_heads), layer.head_dim or config.head_dim)
        for layer in config.layers
    )
    by_kernel = _reads_by_kernel(run, rows, config)
    # A TPU fills its tiles.
    tile = 128 if by_kernel and run.platform == "tpu" else 1
    attention_width = 2 * max(count * -(-width // tile) * tile for count, width in heads) // tensor
    attending = tokens * attention_width * itemsize
    if by_kernel:
        return max(tokens * mlp_width * itemsize, 2 * attending)
    prompt = _prompt_width(run)
    with jax.sharding.use_abstract_mesh(run.mesh):
        queries, together = prefill_columns(rows, prompt), _rows_read_together(run, rows)
        parts = rows_of_device(rows) // together
        sizes = {"num_rows": rows // parts, "num_heads": config.num_heads, "num_keys": prompt}
        blocks = ScoreBlocks.fitting(**sizes, num_queries=queries)
        scores = together // blocks.rows * -(-queries // blocks.queries) * prompt
    own_heads = config.num_heads if config.num_heads % tensor else config.num_heads // tensor
    return max(
        tokens * mlp_width * itemsize,
        attending + own_heads * scores * (4 + itemsize),
    )


def _reads_by_kernel(run: _Run, rows: int, config: TransformerConfig) -> bool:
    """True where prompts go through a kernel, as whole rows may.

    Of GPUs that is known only with their compute capability: of an imagined one, or where the mesh of their devices is
    in force, as it is while a run is compiled for them.
    """
    with jax.sharding.use_abstract_mesh(run.mesh):
        is_imagined = isinstance(run.mesh.abstract_device, AbsentDevice)
        is_gpu = run.platform == "gpu" and (is_imagined or not jax.sharding.get_mesh().empty)
        is_known = run.platform == "tpu" or is_gpu
        if not is_known or run.everything.keys() & {PREFIX, PROMPT}:
            return False
        chosen = choose_attention(run.config.model.attn_implementation, config, run.part.dtype)
        prompt = _prompt_width(run)
        are_whole = prefill_columns(rows, prompt) == prompt
    return are_whole and chosen != "einsum" and begins_by_kernel(config, chosen)


def _activations(run: _Run) -> tuple[int, int]:
    """(what is kept for the backward pass, what one layer adds while it is computed again)."""
    kept, everything = (
        activation_bytes(
            policy,
            run.part.params,
            run.part.frozen,
            mesh=run.mesh,
            rows=run.rows,
            length=run.length,
            split_sizes=_split_sizes(run.part),
            has_context=run.has_context,
        )
        for policy in (run.part.counted, run.part.keeping)
    )
    return kept, (everything - kept) // run.part.depth


def _sampled(part: LanguageShapes, everything: Any, read: Any, *, is_tpu: bool) -> tuple[int, int]:
    """(bytes of the parameters that a sampling call makes of those that lie there, bytes that it gathers over fsdp).

    Kernels are rounded to the dtype of the computation, then made whole over fsdp. Q heads steer, and stay in float32
    but on TPUs, whose products read float32 as bfloat16; their targets are not read.
    """
    everything, read = (
        {name: tree for name, tree in trees.items() if name != "target_q_heads"}
        for trees in (everything, read)
    )
    if is_tpu and part.mesh.shape["fsdp"] > 1 and "q_heads" in read:
        halved = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), read["q_heads"])  # type: ignore[no-untyped-call]
        read = {**read, "q_heads": halved}
    whole = _bytes(read, part.mesh, whole=True)
    if part.mesh.shape["fsdp"] > 1:
        return whole, whole - _bytes(read, part.mesh)
    lying = {path_name(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(everything)}
    for name in everything.keys() & set(TABLES):  # a table that is rounded already is its own copy
        lying[f"{name}/{ROUNDED}"] = lying[f"{name}/embedding"]
    made = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if lying.get(path_name(path)) != leaf.dtype else None, read
    )
    return _bytes(made, part.mesh), 0


def _step_traffic(run: _Run) -> Bytes:
    """Bytes that a device sends for a microbatch; see docs/scaling.md."""
    data, tensor = run.mesh.shape["data"], run.mesh.shape["tensor"]
    read = {name: tree for name, tree in run.everything.items() if name != "target_q_heads"}
    gathered = _bytes(read, run.mesh, whole=True) - _bytes(read, run.mesh)
    own = _bytes(run.stepped, run.mesh)
    passes = 3 if run.config.train.remat else 2
    sums = 2 * passes * run.part.lm.config.num_layers
    parts = experts_parts(run.mesh)
    of_experts = {
        "expert: gradients of all but experts summed": _ring(
            own - _expert_bytes(run.stepped, run.mesh), parts
        ),
        **_exchanged(run.part, rows=run.rows, length=run.length, passes=passes),
    }
    return {
        "fsdp: parameters gathered, forward and backward": 2 * gathered,
        "fsdp: gradients scattered": _bytes(run.stepped, run.mesh, whole=True) - own,
        "data: gradients summed": _ring(own, data),
        **_target_traffic(run),
        "data, fsdp: the frozen layers' output": _picked_traffic(run),
        "tensor: activations summed": sums
        * _ring(_stream_bytes(run.part, rows=run.rows, length=run.length), tensor),
        **(of_experts if parts > 1 else {}),
    }


def _target_traffic(run: _Run) -> Bytes:
    """Bytes that a device sends for ILQL's target heads: hidden layers, and actions' columns of the last kernels."""
    heads = run.everything.get("target_q_heads")
    if heads is None:
        return {}
    columns = 0
    gathered = heads
    if _looks_up(heads["0"]):
        gathered = {name: {"hidden": head["hidden"]} for name, head in heads.items()}
        columns = 4 * len(heads) * _num_actions(run) * heads["0"]["out"]["kernel"].shape[0]
    fsdp, read = run.mesh.shape["fsdp"], {"q_heads": gathered}
    return {
        "fsdp: target heads": _bytes(read, run.mesh, whole=True)
        - _bytes(read, run.mesh)
        + columns * (fsdp - 1) // fsdp
    }


def _picked_traffic(run: _Run) -> int:
    """Bytes that a device sends so that rows of the frozen layers' output come to those that compute them.

    A shuffled row may be on any device: all rows of a microbatch are added up, zero where they are not.
    """
    rows, parts = run.footprint.update_rows, rows_parts(run.mesh)
    if not rows or not run.splits_rows or rows % parts:
        return 0
    return _trunk_bytes(run) * (parts - 1) * run.rows // rows


def _exchanged(part: LanguageShapes, *, rows: int, length: int, passes: int) -> Bytes:
    """Bytes that a device sends so that tokens reach the experts of others, and answers come back.

    Along `expert` tokens are gathered, and float32 sums of answers are scattered; a backward pass does the reverse.
    """
    parts, config = experts_parts(part.mesh), part.lm.config
    if parts == 1 or not isinstance(config, TransformerConfig):
        return {}
    numbers = rows_of_device(rows, part.mesh) * length * sum(_expert_stream_widths(config))
    sent = numbers * (jnp.dtype(part.dtype).itemsize + 4)
    return {"expert: tokens gathered, answers summed": passes * (parts - 1) * sent}


def _expert_stream_widths(config: TransformerConfig) -> list[int]:
    """Numbers that the experts of each layer read of a token, and answer: latent ones, where there are some."""
    layers = (layer.experts for layer in config.layers)
    return [experts.latent_width or config.width for experts in layers if experts is not None]


def _expert_bytes(tree: Any, mesh: AbstractMesh) -> int:
    """Bytes on one device of the arrays of a tree that are split by expert."""
    places = tree_shardings(mesh, tree)[0]
    sizes = jax.tree.map(
        lambda leaf, place: (
            math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            if any(EXPERT in (axes or ()) for axes in place.spec)
            else 0
        ),
        tree,
        places,
    )
    return sum(jax.tree.leaves(sizes))


def _reference_traffic(run: _Run) -> Bytes:
    """Bytes that a device sends for the reference in a microbatch of an update that reads it."""
    if not run.footprint.update_reads_reference:
        return {}
    # The trunk's output is there already; under an adapter the frozen layers are the reference.
    read = [run.reference or run.part.frozen]
    found = _pass_traffic(run.part, read, run.part.depth, rows=run.rows, length=run.length)
    return {f"reference, {name}": size for name, size in found.items()}


def _token_traffic(run: _Run) -> Bytes:
    """Bytes that a device sends in sampling."""
    rows = run.footprint.slots or run.footprint.sampling_rows
    if not rows:
        return {}
    stream = _ring(_stream_bytes(run.part, rows=rows, length=1), run.mesh.shape["tensor"])
    return {
        "fsdp: parameters gathered, once a call": run.sampled[1],
        "tensor: activations summed, each token": 2 * run.part.lm.config.num_layers * stream,
        **_renamed(_exchanged(run.part, rows=rows, length=1, passes=1), ", each token"),
    }


def _renamed(sizes: Bytes, end: str) -> Bytes:
    return {f"{name}{end}": size for name, size in sizes.items()}


def _scoring_traffic(run: _Run) -> Bytes:
    """Bytes that a device sends where policy or reference score rows outside of the update."""
    footprint, layers = run.footprint, run.part.lm.config.num_layers
    if footprint.scores == "rollouts":
        # Policy and reference share one pass of the frozen trunk. Under an adapter the reference has nothing of its
        # own, and reads all layers none the less.
        layers += 0 if footprint.reference is None else run.part.depth
        read = [run.everything, run.reference]
        return _pass_traffic(run.part, read, layers, rows=footprint.sampling_rows, length=run.length)
    if footprint.scores == "steps":
        read = [{**run.part.frozen, **run.reference}]
        found = _pass_traffic(run.part, read, layers, rows=run.rows, length=run.length)
        return {name: run.microbatches * size for name, size in found.items()}
    return {}


def _split_sizes(part: LanguageShapes) -> tuple[int, ...]:
    """Sizes of the axes that `tensor` splits: query heads, MLP width, the channels of Mamba, and the heads that queries
    share, where whole ones fall to a device.
    """
    config, tensor = part.lm.config, part.mesh.shape["tensor"]
    sizes = (config.num_heads, *_mlp_widths(config))
    if not isinstance(config, TransformerConfig) or tensor == 1:
        return sizes
    channels = {layer.mixer.width for layer in config.layers if isinstance(layer.mixer, Mamba1)}
    kv_heads = {layer.num_kv_heads or config.num_kv_heads for layer in config.layers}
    return (*sizes, *sorted(channels), *sorted(count for count in kv_heads if count % tensor == 0))


def _mlp_widths(config: TransformerConfig | Seq2SeqConfig) -> tuple[int, ...]:
    return config.mlp_widths if isinstance(config, TransformerConfig) else (config.mlp_width,)


def _pass_traffic(part: LanguageShapes, read: list[Any], layers: int, *, rows: int, length: int) -> Bytes:
    """Bytes sent by forward passes through `layers` layers that read these trees."""
    stream = _ring(_stream_bytes(part, rows=rows, length=length), part.mesh.shape["tensor"])
    return {
        "fsdp: parameters gathered": sum(
            _bytes(tree, part.mesh, whole=True) - _bytes(tree, part.mesh) for tree in read
        ),
        "tensor: activations summed": 2 * layers * stream,
        **_exchanged(part, rows=rows, length=length, passes=1),
    }


def _bytes(tree: Any, mesh: AbstractMesh, *, whole: bool = False) -> int:
    """Bytes of a tree on one device; `whole`: whole over fsdp, as a layer that is at work."""
    return sum(_leaf_bytes(tree, mesh, whole=whole))


def _leaf_bytes(tree: Any, mesh: AbstractMesh, *, whole: bool) -> list[int]:
    """Bytes of each array of a tree on one device."""

    def size(leaf: Any, place: NamedSharding) -> int:
        if whole:
            kept = [None if "fsdp" in (axes or ()) else axes for axes in place.spec]
            place = NamedSharding(mesh, PartitionSpec(*kept))
        return math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    found: list[int] = jax.tree.leaves(jax.tree.map(size, tree, tree_shardings(mesh, tree)[0]))
    return found


def _ring(size: int, devices: int) -> int:
    """Bytes that a device sends so that all have the sum: 2 (n − 1)/n of the array."""
    return 2 * size * (devices - 1) // devices


def _stream_bytes(part: LanguageShapes, *, rows: int, length: int) -> int:
    """Bytes of the residual stream of a device's own rows."""
    own = rows_of_device(rows, part.mesh)
    return own * length * part.lm.feature_width * jnp.dtype(part.dtype).itemsize
