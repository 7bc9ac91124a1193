# SPDX-License-Identifier: Apache-2.0
"""Speed of sampling, scoring and learning on this machine, beside the least time that the work can take.

`benchmarks/` and `jrl bench` are this package's two faces; benchmarks/README.md says how to read a record.
"""
