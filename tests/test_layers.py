# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: the layer table of the design, read off the source of every module."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jrl"
JAX = {"jax", "jaxtyping", "numpy"}
# Module prefix -> (modules of jrl it may import, distributions it may import). The longest prefix rules.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    "jrl.typing": ({"jrl.typing"}, JAX),
    "jrl.mesh": (set(), JAX),
    "jrl.version": (set(), set()),
    "jrl.suggestions": (set(), set()),
    "jrl.built_in": (set(), set()),
    "jrl.rewards": ({"jrl.isolation"}, set()),
    "jrl.isolation": (set(), set()),
    "jrl.isolation_worker": (set(), set()),
    "jrl.image_rewards": (set(), {"numpy", "PIL"}),
    "jrl.upload": (set(), {"huggingface_hub"}),
    "jrl.ops": ({"jrl.typing", "jrl.ops"}, JAX),
    "jrl.losses": ({"jrl.typing", "jrl.suggestions", "jrl.ops", "jrl.losses"}, JAX),
    "jrl.models": (
        {"jrl.typing", "jrl.suggestions", "jrl.mesh", "jrl.ops", "jrl.losses", "jrl.models"},
        JAX | {"flax", "ml_dtypes", "safetensors"},
    ),
    "jrl.models.safetensors_write": ({"jrl.models"}, {"numpy", "huggingface_hub"}),
    "jrl.models.hub": ({"jrl.models", "jrl.suggestions"}, {"huggingface_hub", "transformers"}),
    "jrl.models.model_object": ({"jrl.models"}, {"numpy", "ml_dtypes", "transformers"}),
    "jrl.models.diffusion.tokenizer": ({"jrl.models"}, {"numpy", "jaxtyping", "transformers"}),
    "jrl.models.adapters": (
        {"jrl.typing", "jrl.suggestions", "jrl.mesh", "jrl.ops", "jrl.models"},
        JAX | {"flax", "ml_dtypes"},
    ),
    "jrl.models.quantize": (
        {"jrl.typing", "jrl.mesh", "jrl.ops", "jrl.models"},
        JAX | {"flax", "ml_dtypes", "qwix"},
    ),
    "jrl.models.families": (
        {"jrl.typing", "jrl.suggestions", "jrl.mesh", "jrl.ops", "jrl.models"},
        JAX | {"flax", "ml_dtypes", "transformers"},
    ),
    "jrl.data": (
        {"jrl.typing", "jrl.ops.alignment", "jrl.ops.z_scores", "jrl.data"},
        {"numpy", "jaxtyping", "tokenizers", "transformers", "datasets"},
    ),
    "jrl.data.sources.records": ({"jrl.suggestions", "jrl.data"}, {"datasets", "huggingface_hub"}),
    "jrl.data.sources.mapping": ({"jrl.version"}, {"numpy", "rich", "transformers"}),
    "jrl.data.chat.rendering": (
        {"jrl.typing", "jrl.data"},
        {"transformers", "jinja2"},
    ),
    "jrl.data.chat.template_limits": (set(), {"jinja2"}),
    "jrl.environments": (
        {
            "jrl.data.chat",
            "jrl.data.tokenizer",
            "jrl.rollout.async_calls",
            "jrl.rollout.keywords",
            "jrl.environments",
        },
        {"numpy", "reasoning_gym", "textarena", "verifiers"},
    ),
    "jrl.forward": ({"jrl.typing", "jrl.mesh", "jrl.ops"}, JAX),
    "jrl.distributed": (set(), JAX | {"orbax"}),
    "jrl.placement": ({"jrl.mesh", "jrl.distributed"}, JAX),
    "jrl.compilation": ({"jrl.data.sources.mapping"}, JAX),
    "jrl.device_memory": (set(), JAX),
    "jrl.rollout": (
        {"jrl.typing", "jrl.mesh", "jrl.ops", "jrl.losses", "jrl.forward", "jrl.rollout"},
        JAX,
    ),
    # What meets the host: prompts, processes, compiled samplers.
    **{
        f"jrl.rollout.{name}": (
            {
                "jrl.typing",
                "jrl.mesh",
                "jrl.ops",
                "jrl.data.batching",
                "jrl.data.prompts",
                "jrl.data.seam",
                "jrl.compilation",
                "jrl.distributed",
                "jrl.placement",
                "jrl.rollout",
            },
            JAX,
        )
        for name in (
            "ahead",
            "collect",
            "episodes",
            "experience",
            "gathering",
            "reward_call",
            "sampler",
            "slot_collector",
            "turns",
        )
    },
    "jrl.learners": (
        {"jrl.typing", "jrl.suggestions", "jrl.mesh", "jrl.ops", "jrl.losses", "jrl.forward", "jrl.learners"},
        {"jax", "jaxtyping", "optax", "flax"},
    ),
}
# Above the learners everything below is open, and the loops may use any declared dependency.
OPEN = (
    "jrl.trainers",
    "jrl.methods",
    "jrl.interop",
    "jrl.named_functions",
    "jrl.api",
    "jrl.bench",
    "jrl.cli",
    "jrl.notebook",
    "jrl.sweep",
    "jrl.trlx",
    "jrl.trl",
    "jrl.__main__",
    "jrl",
)
TOP = (
    "jrl.api",
    "jrl.bench",
    "jrl.cli",
    "jrl.interop",
    "jrl.notebook",
    "jrl.sweep",
    "jrl.trlx",
    "jrl.trl",
    "jrl.__main__",
)
# Algorithms of one folder know nothing of each other; what they share is named here.
SHARED = {
    "jrl.learners": {
        "state",
        "config",
        "guards",
        "optimizers",
        "accumulate",
        "balance",
        "forward",
        "recipe",
        "diffusion_config",
        "credit",
        "groups",
        "online",
    },
    "jrl.losses": {"policy_gradient"},
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, module: str) -> set[str]:
    """Dotted names a file imports, at whatever depth; `from a import b` is a.b where that is a module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the layer they reach into"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in MODULES else node.module)
    return names


def within(name: str, prefixes: set[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def rule_of(module: str) -> tuple[set[str], set[str]] | None:
    matching = [prefix for prefix in TABLE if within(module, {prefix})]
    return TABLE[max(matching, key=len)] if matching else None


def breaches(module: str, names: set[str]) -> list[str]:
    """What a module may not import, each with the reason."""
    found = []
    rule = rule_of(module)
    if rule is None and module not in OPEN and not within(module, set(OPEN[:-1])):
        found.append(f"{module} stands in no layer of the table")
    for name in sorted(names):
        if within(name, {"jrl"}):
            if rule is not None and not within(name, rule[0]):
                found.append(f"{module} may not import {name}")
            if rule is None and not within(module, set(TOP)) and module != "jrl" and within(name, set(TOP)):
                found.append(f"{module} may not import {name}, which stands above it")
        elif rule is not None:
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top not in rule[1]:
                found.append(f"{module} may not import {top}")
    for folder, shared in SHARED.items():
        if within(module, {folder}) and module != folder:
            word = module.removeprefix(f"{folder}.").split(".")[0]
            for name in names:
                other = name.removeprefix(f"{folder}.").split(".")[0]
                if not within(name, {folder}) or name == folder or other in shared:
                    continue
                if word in shared or other.split("_")[0] != word.split("_")[0]:
                    found.append(f"{module} may not import its sibling {name}")
    return found


def test_what_is_shared_exists() -> None:
    assert {f"{folder}.{word}" for folder, shared in SHARED.items() for word in shared} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    assert breaches(module, imports(MODULES[module], module)) == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("jrl.ops.kl", "jrl.losses.ppo"),
        ("jrl.ops.kl", "flax"),
        ("jrl.losses.ppo", "jrl.losses.sft"),
        ("jrl.losses.ppo", "jrl.models.policy"),
        ("jrl.learners.ppo", "jrl.learners.sft"),
        ("jrl.learners.accumulate", "jrl.learners.ppo"),
        ("jrl.learners.ppo", "jrl.rollout.score"),
        ("jrl.rollout.generate", "jrl.models.transformer"),
        ("jrl.models.transformer", "transformers"),
        ("jrl.data.prompts", "jax"),
        ("jrl.trainers.ppo", "jrl.api"),
        ("jrl.brand_new", "jax"),
    ],
)
def test_a_breach_is_seen(module: str, name: str) -> None:
    assert breaches(module, {name})


@pytest.mark.parametrize(("face", "other"), [("jrl.trl", "jrl.trlx"), ("jrl.trlx", "jrl.trl")])
def test_the_faces_know_nothing_of_each_other(face: str, other: str) -> None:
    for module, path in MODULES.items():
        if within(module, {face}):
            assert not [name for name in imports(path, module) if within(name, {other})], module


# What a face may not name, and why it does so still.
NOT_YET_OFFERED: dict[tuple[str, str], str] = {}


def is_room(name: str) -> bool:
    return name in MODULES and MODULES[name].name == "__init__.py"


def offered(room: str) -> list[str] | None:
    """What a room's `__all__` lists; None where it lists nothing, so that its modules are what it offers."""
    for node in ast.parse(MODULES[room].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return None


def is_inside(name: str) -> bool:
    """Whether this is a module of a room that offers names instead of modules."""
    room = name.rpartition(".")[0]
    return name in MODULES and not is_room(name) and room.count(".") > 1 and offered(room) is not None


def reaches(module: str) -> list[str]:
    """What a face takes from the inside of a room, or under a private name."""
    face, found = ".".join(module.split(".")[:2]), []
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not within(str(node.module), {"jrl"}):
            continue
        home = str(node.module)
        for name in (alias.name for alias in node.names):
            full = f"{home}.{name}"
            module_of = full if full in MODULES and name not in (offered(home) or ()) else home
            if not within(home, {face}) and (name.startswith("_") or is_inside(module_of)):
                found.append(full)
    return [name for name in found if (module, name) not in NOT_YET_OFFERED]


@pytest.mark.parametrize("module", [name for name in MODULES if within(name, {"jrl.trl", "jrl.trlx"})])
def test_a_face_takes_what_rooms_offer(module: str) -> None:
    assert reaches(module) == []


def set_from_outside(text: str) -> list[str]:
    """Attributes that a module sets on what is neither `self` nor an object of a library."""
    found = []
    for node in ast.walk(ast.parse(text)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in (one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])):
            if not isinstance(target, ast.Attribute) or target.attr.startswith("__"):
                continue  # what the language itself names is set from outside
            if ast.unparse(target.value) not in ("self", "cls", *FOREIGN):
                found.append(f"{ast.unparse(target)}, line {target.lineno}")
    return found


FOREIGN = ("error", "tokenizer", "hf_config", "warnings")


@pytest.mark.parametrize("room", ["trainers", "rollout", "learners", "losses", "ops", "cli", "sweep"])
def test_nobody_sets_the_attributes_of_another_object(room: str) -> None:
    breaches = {
        str(path.relative_to(ROOT)): found
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if (found := set_from_outside(path.read_text(encoding="utf-8")))
    }
    assert breaches == {}
    assert set_from_outside("def f(trainer):\n    trainer.history, x = [], 1") == ["trainer.history, line 2"]


# Where positions and their targets are taken apart outside `jrl.ops.alignment`, and why.
SHIFTS = {
    "jrl.rollout.text": "drops an EOS, which has no text",
    "jrl.models.positions": "a segment begins where a column's id differs from its left neighbour's",
    "jrl.trl.ddpo": "the two ends of a step of denoising: latents, no tokens",
    "jrl.trl.ppo_data": "flags of whole rows, as TRL passes queries and responses, given to the states before them; "
    "and drops the start token that an encoder-decoder's decoder writes first",
    "jrl.trlx.decoding": "drops the start token that an encoder-decoder's decoder writes first",
    "jrl.trlx.maths": "trlX's batches: `dones` has one state more than actions",
    "jrl.trlx.store_rows": "trlX's batches: `dones` and `states_ixs` have one state more than actions",
    "jrl.trlx.stores": "the start token of a decoder, which is no label",
    "jrl.trlx.trainer.accelerate_ilql_trainer": "trlX's batches: `dones` has one state more than actions",
    "jrl.trlx.trainer.accelerate_ppo_trainer": "drops the start token that an encoder-decoder's decoder writes first",
}


# Names of what has one entry for each token of a row.
ONE_A_TOKEN = {
    *(
        "dones",
        "flags",
        "ids",
        "input_ids",
        "labels",
        "learned",
        "logprobs",
        "mask",
        "reward",
        "rewards",
        "row",
    ),
    *("response", "states", "targets", "tokens"),
}


def shifts(text: str) -> list[str]:
    """Slices that drop the first or the last of an axis of rows, or of one row where its name says what it holds."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Subscript):
            continue
        if isinstance(node.slice, ast.Tuple):
            *_, last = [ast.unparse(part) for part in node.slice.elts]
            shifted = last in ("1:", ":-1") and ast.unparse(node.slice.elts[0]) in (":", "...")
        else:
            name = ast.unparse(node.value).removesuffix(".ravel()").rpartition(".")[2]
            shifted = name in ONE_A_TOKEN and ast.unparse(node.slice) in ("1:", ":-1")
        if shifted:
            found.append(f"{ast.unparse(node)}, line {node.lineno}")
    return found


def test_only_alignment_shifts_tokens() -> None:
    """docs/internals/0001-shift-once.md: what is left elsewhere is named with its reason, and nothing else is."""
    found = {name: shifts(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}
    assert found.pop("jrl.ops.alignment")
    assert {name: places for name, places in found.items() if places and name not in SHIFTS} == {}
    assert [name for name in SHIFTS if not found[name]] == []


@pytest.mark.parametrize(
    "code",
    [
        "logits[:, :-1]",
        "x.labels[:, 1:]",
        "row.learned[1:]",
        "mask[..., 1:]",
        "a[:, :, 1:]",
        "ids[1:]",
        "dones.ravel()[:-1]",
    ],
)
def test_a_shift_is_seen(code: str) -> None:
    assert shifts(code) == [f"{code}, line 1"]


def test_the_package_itself_needs_no_torch() -> None:
    for module, path in MODULES.items():
        assert not {name.split(".")[0] for name in imports(path, module)} & {
            "torch",
            "diffusers",
            "trl",
            "peft",
        }
