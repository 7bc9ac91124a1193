# SPDX-License-Identifier: Apache-2.0
"""A transformers model object of torch as a checkpoint: its tensors are read where they lie, no file is written.

jrl never imports torch or peft. Whoever has such an object has imported them, and what is called here are the object's
own methods, and functions of the libraries that made it.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (gives NumPy the names bfloat16 and float8)
import numpy as np

from jrl.models.safetensors_io import TensorInfo, check_finite

_LORA = ".lora_"
_WRAPPERS = re.compile(r"\.((token_adapter|base_layer)\.)+")
_KEPT, _SAVED, _ROWS = ".original_module.", ".modules_to_save.", ".trainable_tokens_"


@dataclass(frozen=True, eq=False)
class ModelObject:
    """A transformers model object, or a PEFT model around one, as a value that names a checkpoint.

    It is never copied with the configuration that holds it, and a text of it says class and name.

    Attributes:
      module: The object: `config` is a transformers config, and `state_dict()` gives torch tensors.
      below_adapter: Whether it is the inner model of a PEFT model, with the layers of an adapter among its own.
    """

    module: Any
    below_adapter: bool = False

    def __deepcopy__(self, memo: Any) -> ModelObject:
        return self

    def __repr__(self) -> str:
        return f"{type(self.module).__name__} object" + (f" named {self.name!r}" if self.name else "")

    @property
    def name(self) -> str | None:
        """Folder or hub id that the object was loaded from; None: it was made from a config."""
        return self.module.config._name_or_path or None

    @property
    def tokenizer_path(self) -> str | None:
        """Folder on this disk that the object was loaded from, where its tokenizer lies; None: there is none."""
        name = self.name
        return name if name is not None and Path(name).is_dir() else None

    def require_tokenizer(self, argument: str) -> str:
        """The folder of the object's tokenizer.

        Args:
          argument: What the caller would give otherwise, for the message.
        Raises:
          ValueError: If there is none.
        """
        if self.tokenizer_path is None:
            raise ValueError(
                f"{argument} must be given for {self}: the object brings no tokenizer, and its name is no folder here."
            )
        return self.tokenizer_path

    @property
    def config(self) -> Any:
        """A copy of the transformers config."""
        return copy.deepcopy(self.module.config)

    @property
    def generation_config(self) -> dict[str, Any] | None:
        """Contents of generation_config.json; None where they are only derived from the config."""
        found = getattr(self.module, "generation_config", None)  # classifiers write no text and have none
        if found is None:
            return None
        if found._from_model_config and found.eos_token_id == self.module.config.eos_token_id:
            return None
        return dict(json.loads(found.to_json_string()))

    @property
    def adapter(self) -> Any:
        """The PEFT config of the active adapter; None: the object is no PEFT model.

        Raises:
          ValueError: If several adapters are active, or the adapter is merged into the weights at the moment.
        """
        if not hasattr(self.module, "peft_config") or not hasattr(self.module, "get_base_model"):
            return None
        active = self.module.active_adapters
        if len(active) != 1:
            raise ValueError(
                f"{self} must have one active adapter, got {list(active)}: call `set_adapter(name)`."
            )
        if any(getattr(layer, "merged", False) for layer in self.module.modules()):
            raise ValueError(
                f"{self} has its adapter merged into the weights: call `unmerge_adapter()` to train it on, or "
                "`merge_and_unload()` for a model without an adapter."
            )
        return self.module.peft_config[active[0]]

    @property
    def base(self) -> ModelObject:
        """The model below a PEFT model's adapter."""
        return ModelObject(self.module.get_base_model(), below_adapter=True)

    def tensors(self) -> ObjectTensors:
        """The model's tensors under the names of its checkpoint, without those of an adapter in it.

        Raises:
          ValueError: If there is an adapter that no PEFT model holds, or tensors have no values.
        """
        # Only here: it needs torch, which this object brought.
        from transformers.core_model_loading import revert_weight_conversion

        own = self.module.state_dict()
        if self.below_adapter:
            own = {
                _WRAPPERS.sub(".", name).replace(_KEPT, "."): tensor
                for name, tensor in own.items()
                if not any(part in name for part in (_LORA, _SAVED, _ROWS))
            }
        elif any(_LORA in name for name in own):
            raise ValueError(
                f"{self} has an adapter of its own (`add_adapter`), which jrl does not read: give the model that "
                "`peft.get_peft_model` or `PeftModel.from_pretrained` makes."
            )
        # Some families lie in memory otherwise than in files: experts stacked, projections joined.
        return ObjectTensors(self, revert_weight_conversion(self.module, own))

    def adapter_tensors(self) -> ObjectTensors:
        """The active adapter's tensors under the names of PEFT's files."""
        peft = sys.modules["peft"]  # which made this object
        (active,) = self.module.active_adapters
        # Without this argument PEFT asks the hub for the base model's config.
        options = {"adapter_name": active, "save_embedding_layers": False}
        return ObjectTensors(self, peft.get_peft_model_state_dict(self.module, **options))


class ObjectTensors:
    """The tensors of a model object, with the interface of `TensorFiles`.

    Args:
      owner: The object.
      tensors: Its torch tensors by the names that files have.

    Attributes:
      folder: The object, for messages.
      source: Likewise.
      info: What each tensor is, by name.

    Raises:
      ValueError: If a tensor has no values here, or a dtype that NumPy lacks.
    """

    folder: Any
    source: Any

    def __init__(self, owner: ModelObject, tensors: Mapping[str, Any]):
        self.folder = self.source = owner
        self._tensors = dict(tensors)
        self.info = {name: self._describe(name) for name in self._tensors}

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors."""
        return iter(self.info)

    def read(self, name: str, dtype: Any = None, *, finite: bool = True) -> np.ndarray:
        """Reads a tensor; see `TensorFiles.read`."""
        info, tensor = self.info[name], self._tensors[name].detach().cpu()
        # NumPy's own dtypes are torch's too; the others fit into float32 without loss.
        array = (tensor if info.dtype.isbuiltin == 1 else tensor.float()).numpy()
        with np.errstate(all="ignore"):
            array = array.astype(info.dtype if dtype is None else dtype, copy=False)
        if finite:
            check_finite(array, info.path, name)
        return array

    def _describe(self, name: str) -> TensorInfo:
        tensor = self._tensors[name]
        if tensor.is_meta:
            raise ValueError(
                f"{self.source}: {name} has no values (torch's meta device): load the model without `device_map` "
                "offloading, or name its folder."
            )
        try:
            dtype = np.dtype(str(tensor.dtype).removeprefix("torch."))
        except TypeError as error:
            raise ValueError(
                f"{self.source}: {name} has dtype {tensor.dtype}, which jrl does not read."
            ) from error
        return TensorInfo(self.source, dtype, tuple(tensor.shape))


def is_model_object(value: Any) -> bool:
    """True for a transformers model of torch, and for a PEFT model around one."""
    config = getattr(value, "config", None)
    return callable(getattr(value, "state_dict", None)) and isinstance(
        getattr(config, "model_type", None), str
    )


def as_source(value: Any) -> Any:
    """A model object as a value that configurations can hold; anything else as it is."""
    return ModelObject(value) if is_model_object(value) else value
