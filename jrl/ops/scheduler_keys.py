# SPDX-License-Identifier: Apache-2.0
"""Keys of a `scheduler_config.json`: each is a field of a schedule, or has an implemented value, or changes nothing.

A key that nobody reads may ask for something that is not implemented, in a version of diffusers to come too.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Fixed(NamedTuple):
    """Values of a key that are implemented.

    Attributes:
      values: All of them.
      because: Why there are no others, behind the colon of an error.
    """

    values: tuple[Any, ...]
    because: str


_FLOW = "it asks for the levels of a flow, and this model has β"
NOISE_FIXED: Mapping[str, Fixed] = MappingProxyType(
    {
        "timestep_type": Fixed(("discrete",), "the network is told levels of noise, and not timesteps"),
        "timestep_values": Fixed((None,), "timesteps follow from `timestep_spacing`"),
        "use_flow_sigmas": Fixed((False, None), _FLOW),
        "use_dynamic_shifting": Fixed((False, None), _FLOW),
        "shift_terminal": Fixed((None,), _FLOW),
        "variance_type": Fixed(
            (None, "fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
            "the network predicts a variance, too",
        ),
        "set_alpha_to_one": Fixed((False, True), "it is true or false"),
    }
)
"""Keys of models with β that have one value here, or change nothing at all of their values."""
NOISE_SILENT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "algorithm_type",
                "disable_corrector",
                "euler_at_final",
                "lambda_min_clipped",
                "lower_order_final",
                "original_inference_steps",
                "predict_x0",
                "skip_prk_steps",
                "solver_order",
                "solver_p",
                "solver_type",
                "timestep_scaling",
            ),
            "how the sampler that the file names makes a step; here it is DDIM always",
        ),
        **dict.fromkeys(
            (
                "final_sigmas_type",
                "interpolation_type",
                "sigma_max",
                "sigma_min",
                "use_beta_sigmas",
                "use_exponential_sigmas",
                "use_karras_sigmas",
                "use_lu_lambdas",
            ),
            "where the sampler that the file names puts its levels; DDIM has timesteps of training",
        ),
        **dict.fromkeys(("flow_shift", "time_shift_type"), "read with `use_flow_sigmas` alone"),
        "tensor_format": "of old files: which library held the arrays",
    }
)
"""Keys of samplers of models with β that change nothing here, each with the reason."""
FLOW_FIXED: Mapping[str, Fixed] = MappingProxyType(
    dict.fromkeys(
        (
            "invert_sigmas",
            "stochastic_sampling",
            "use_beta_sigmas",
            "use_exponential_sigmas",
            "use_karras_sigmas",
        ),
        Fixed((False, None), "nothing else is implemented"),
    )
)
"""Keys of a flow's scheduler that have one value here."""


# As JSON says them.
_WORDS: Mapping[Any, str] = {False: "false", True: "true", None: "null"}


def read_keys(
    config: Mapping[str, Any],
    kinds: Mapping[str, str],
    *,
    fixed: Mapping[str, Fixed],
    silent: Mapping[str, str],
) -> dict[str, Any]:
    """The values of a scheduler's configuration that a schedule has fields for.

    Args:
      config: The content of the file. Keys that begin with `_` are notes of the writer's.
      kinds: Annotation of each field.
      fixed: Other keys, of which some values are implemented.
      silent: Keys that change nothing.
    Returns:
      What the file names of `kinds`.
    Raises:
      ValueError: If a key is unknown, or a value of a wrong kind or not implemented.
    Reference: none; a check of keys.
    Example:
      >>> read_keys({"shift": 3, "_class_name": "Any"}, {"shift": "float"}, fixed={}, silent={})
      {'shift': 3.0}
    """
    found = {}
    for name, value in config.items():
        if name in kinds:
            found[name] = typed_value(value, name=name, kind=kinds[name])
        elif name in fixed:
            # By type too: 0 is no false.
            if not any(value == known and type(value) is type(known) for known in fixed[name].values):
                says = " or ".join(_WORDS.get(known, repr(known)) for known in fixed[name].values)
                raise ValueError(
                    f"the scheduler's `{name}` must be {says}, got {value!r}: {fixed[name].because}."
                )
        elif not name.startswith("_") and name not in silent:
            raise ValueError(
                f"the scheduler's configuration has an unknown key `{name}`, and what it asks for may not be "
                f"implemented. Known: {', '.join([*kinds, *fixed, *silent])}."
            )
    return found


def typed_value(value: Any, *, name: str, kind: str) -> Any:
    """A value of a scheduler's configuration, once it is of the kind that its field has.

    Args:
      value: As the file has it.
      name: Of the key, for messages.
      kind: The field's annotation, such as "float" or "float | None".
    Returns:
      The value; whole numbers as floats and lists as tuples, where the field has those.
    Raises:
      ValueError: If it is of another kind.
    Reference: none; a check of types.
    Example:
      >>> typed_value(3, name="shift", kind="float")
      3.0
    """
    if value is None and kind.endswith("| None"):
        return None
    kind = kind.removesuffix(" | None")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "float" and is_number:
        return float(value)
    if kind.startswith("tuple") and isinstance(value, list | tuple):
        return tuple(typed_value(beta, name=name, kind="float") for beta in value)
    if not isinstance(value, {"int": int, "bool": bool, "str": str}.get(kind, type(None))) or (
        kind == "int" and not is_number
    ):
        raise ValueError(f"the scheduler's configuration must have {kind} for `{name}`, got {value!r}.")
    return value
