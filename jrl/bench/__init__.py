# SPDX-License-Identifier: Apache-2.0
"""How fast a model samples, is scored and learns on this machine, beside the least time that the work can take.

`benchmarks/` and `jrl bench` are this package's two faces; benchmarks/README.md says how to read a record.
"""
