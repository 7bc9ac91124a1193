# SPDX-License-Identifier: Apache-2.0
"""Installs the libraries that jrl is compared with, each set into a virtual environment of its own.

    python benchmarks/peers/install.py [trl074 trlnew] [--folder .peers]

Without names, all of them. What is installed already is left as it is. `benchmarks/compare.py --peers FOLDER` finds
them. The pins of trl 0.7.4 are the newest that it runs with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = {
    "trl074": (
        "trl==0.7.4",
        "torch==2.13.0",
        "transformers==4.38.2",
        "accelerate==0.27.2",
        "peft==0.8.2",
        "numpy<2",
        "pyarrow<20",
        "datasets<3",
    ),
    "trlnew": ("trl==1.16.0", "torch==2.13.0"),
}
"""What each environment holds; pip chooses the rest."""


def interpreter(folder: Path, name: str) -> Path:
    """The Python of an environment, whether it is there or not."""
    return folder / name / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(folder: Path, name: str) -> None:
    """Makes one environment.

    Raises:
      subprocess.CalledProcessError: If pip fails; what it said stands above.
    """
    done = folder / name / "installed.txt"
    if done.exists():
        print(f"{name}: installed already, see {done}")
        return
    subprocess.run([sys.executable, "-m", "venv", folder / name], check=True)
    python = interpreter(folder, name)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]], check=True)
    frozen = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True)
    # Written last: an environment that pip did not finish is installed again.
    done.write_text(frozen.stdout)
    print(f"{name}: installed, versions in {done}")


def main() -> None:
    """Installs what was named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"environments, of {', '.join(REQUIREMENTS)}")
    parser.add_argument("--folder", type=Path, default=Path(".peers"), help="where they go")
    flags = parser.parse_args()
    for name in flags.names:
        if name not in REQUIREMENTS:
            parser.error(f"unknown environment {name!r}; known are {', '.join(REQUIREMENTS)}.")
    for name in flags.names or REQUIREMENTS:
        install(flags.folder, name)


if __name__ == "__main__":
    main()
