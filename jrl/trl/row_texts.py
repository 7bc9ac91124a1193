# SPDX-License-Identifier: Apache-2.0
"""A script's function that makes the text of a row, in the form of either release of TRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Text = Callable[[Mapping[str, Any]], str]


def one_text(formatting_func: Callable[[Any], Any]) -> Text:
    """A function that makes one text of one row, of either form of `formatting_func`.

    The newer form makes a text of a row. The older one makes a list of texts of lists of columns, and is told by giving
    back a list.
    """

    def text(record: Mapping[str, Any]) -> str:
        failure: Exception | None = None
        try:
            found = formatting_func(record)
        except (
            KeyError,
            IndexError,
            TypeError,
        ) as error:  # what indexes lists may fail on a row's own values
            found, failure = [], error
        if isinstance(found, list):
            try:
                found = formatting_func({name: [value] for name, value in record.items()})
            except (KeyError, IndexError, TypeError, AttributeError) as error:
                raise failure or error from error
            if isinstance(found, list) and len(found) == 1:
                found = found[0]
        if not isinstance(found, str):
            raise ValueError(
                f"`formatting_func` must return a text for a row, or a list of texts for lists of columns, got "
                f"{type(found).__name__}."
            )
        return found

    return text
