# SPDX-License-Identifier: Apache-2.0
"""TensorBoard and Weights & Biases. Figures of an evaluation stand under `eval/`, those of training under their own name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jrl.trainers.resume import plain

COUNTERS = ("step", "iteration", "evaluation")


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record under the names that trackers show."""
    prefix = "eval/" if "evaluation" in record else ""
    return {
        f"{prefix}{name}": float(value)
        for name, value in record.items()
        if name not in COUNTERS and isinstance(value, int | float)
    }


class TensorBoardLogger:
    """Event files through tensorboardX.

    Args:
      directory: Of the event files.
      config: The run's configuration, stored as text.
    Raises:
      ImportError: If tensorboardX is missing.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError("`train.tracker: tensorboard` needs: pip install 'jrl[tensorboard]'") from error
        self._writer = SummaryWriter(str(directory))
        lines = [f"    {section}: {values}" for section, values in plain(config).items()]
        self._writer.add_text("config", "\n".join(lines), 0)

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """One point in each curve."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """A Markdown table."""
        cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
        lines = [list(columns), ["---"] * len(columns), *cells]
        self._writer.add_text(name, "\n".join("| " + " | ".join(line) + " |" for line in lines), step)

    def close(self) -> None:
        """Writes what is still held back."""
        self._writer.close()


class WandbLogger:
    """A Weights & Biases run; offline where `WANDB_MODE=offline`.

    Args:
      directory: Where wandb keeps its files.
      config: The run's configuration.
      resuming: Whether an earlier run is continued: its identity is kept in `directory`.
    Raises:
      ImportError: If wandb is missing.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any], *, resuming: bool) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("`train.tracker: wandb` needs: pip install 'jrl[wandb]'") from error
        self._wandb = wandb
        directory.mkdir(parents=True, exist_ok=True)
        identity = directory / "wandb_run_id"
        known = identity.read_text(encoding="utf-8").strip() if resuming and identity.exists() else None
        train = config["train"]
        self._run = wandb.init(
            dir=str(directory),
            project=train["project_name"],
            name=train["run_name"],
            entity=train["entity_name"],
            group=train["group_name"],
            tags=train["tags"] or None,
            config=plain(config),
            id=known,
            resume="allow" if known else None,
        )
        identity.write_text(self._run.id, encoding="utf-8")

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """One point in each curve."""
        self._run.log(scalars(record), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """A wandb table."""
        data = [[plain(cell) for cell in row] for row in rows]
        self._run.log({name: self._wandb.Table(columns=list(columns), data=data)}, step=step)

    def close(self) -> None:
        """Ends the run."""
        self._run.finish()
