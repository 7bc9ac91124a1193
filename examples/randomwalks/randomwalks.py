# SPDX-License-Identifier: Apache-2.0
"""Random walks: shortest paths to a goal in a random directed graph, written as strings of letters.

A toy task that needs no download: a language model of random walks knows the edges, and reinforcement
learning has to find the short ways. The graph, the walks and the metric are those of trlX's example, draw for
draw.

Reference: Chen et al. 2021, "Decision Transformer", arXiv:2106.01345, section 1 (the toy problem).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNFINISHED = 100.0  # length of a path with a wrong edge or without an end


@dataclass(frozen=True)
class RandomWalks:
    """A graph, walks on it, and how good a path is. Node k is the letter `chr(ord("a") + k)`; the goal is
    "a".

    Attributes:
      adjacency: True where an edge leads from the row's node to the column's.
      walks: Walks as strings; one in two or so reaches the goal.
      shortest: Nodes on a shortest path to the goal from each node but the goal, itself included;
        `max_length` where there is none.
      max_length: Longest walk, in nodes.
    """

    adjacency: np.ndarray
    walks: list[str]
    shortest: np.ndarray
    max_length: int

    @property
    def letters(self) -> str:
        """The alphabet, goal first."""
        return "".join(map(_letter, range(len(self.adjacency))))

    @property
    def eval_prompts(self) -> list[str]:
        """Every start that occurs, sorted."""
        return sorted({walk[0] for walk in self.walks})

    def length(self, path: str) -> float:
        """Nodes up to the goal; `UNFINISHED` if an edge is wrong or the goal not reached."""
        nodes = [ord(letter) - ord("a") for letter in path]
        for i, node in enumerate(nodes):
            if not 0 <= node < len(self.adjacency) or (i > 0 and not self.adjacency[nodes[i - 1], node]):
                return UNFINISHED
            if node == 0:
                return float(i + 1)
        return UNFINISHED

    def optimality(self, path: str) -> float:
        """1 for a shortest path from the first letter, 0 for one that is wrong, unfinished or of
        `max_length`.

        Raises:
          ValueError: If the path is empty, or starts at the goal or outside the graph.
        """
        start = ord(path[0]) - ord("a") if path else -1
        if not 1 <= start < len(self.adjacency):
            raise ValueError(f"a path must start at one of {self.letters[1:]!r}, got {path!r}")
        best = self.shortest[start - 1]
        return float((self.max_length - min(self.length(path), self.max_length)) / (self.max_length - best))

    def metric_fn(self, samples: Sequence[str]) -> dict[str, list[float]]:
        """`lengths` and `optimality` of each path."""
        return {
            "lengths": [self.length(path) for path in samples],
            "optimality": [self.optimality(path) for path in samples],
        }

    def reward_fn(self, samples: Sequence[str]) -> list[float]:
        """Optimality of each path."""
        return [self.optimality(path) for path in samples]


def make_randomwalks(
    *,
    num_nodes: int = 21,
    max_length: int = 10,
    num_walks: int = 1000,
    edge_probability: float = 0.1,
    seed: int = 1002,
) -> RandomWalks:
    """Draws graph and walks.

    Some seeds give a graph in which starts cannot reach the goal, or only after `max_length` nodes; 1000 and
    1002 do not.

    Args:
      num_nodes: Nodes, at most 26.
      max_length: Longest walk, in nodes.
      num_walks: Walks.
      edge_probability: Of each edge.
      seed: Of NumPy's legacy generator, whose stream is fixed for good.
    """
    rng = np.random.RandomState(seed)
    while True:
        adjacency = rng.rand(num_nodes, num_nodes) > 1 - edge_probability
        np.fill_diagonal(adjacency, False)
        if adjacency.any(axis=1).all():
            break
    adjacency[0] = False
    adjacency[0, 0] = True
    walks = [_walk(adjacency, max_length, rng) for _ in range(num_walks)]
    return RandomWalks(adjacency, walks, _shortest(adjacency, max_length), max_length)


def _walk(adjacency: np.ndarray, max_length: int, rng: np.random.RandomState) -> str:
    """A walk from a random node other than the goal, until the goal or `max_length` nodes."""
    node = 0
    while node == 0:
        node = rng.randint(0, len(adjacency))
    nodes = [node]
    for _ in range(max_length - 1):
        node = rng.choice(np.nonzero(adjacency[node])[0])
        nodes.append(node)
        if node == 0:
            break
    return "".join(map(_letter, nodes))


def _shortest(adjacency: np.ndarray, max_length: int) -> np.ndarray:
    """Nodes on a shortest path to node 0 from nodes 1, 2, ...: breadth-first from the goal, cut."""
    lengths = np.full(len(adjacency), max_length)
    lengths[0] = 1
    queue = deque([0])
    while queue:
        node = queue.popleft()
        for source in np.nonzero(adjacency[:, node])[0]:
            if lengths[source] > lengths[node] + 1:
                lengths[source] = lengths[node] + 1
                queue.append(source)
    return lengths[1:]


def _letter(node: int) -> str:
    return chr(ord("a") + int(node))
