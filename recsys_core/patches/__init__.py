"""Every replacement of what torch, TorchRec and FBGEMM do, each with its upstream issue and the version it is for.

Versions: torch 2.14.1, TorchRec 1.9.2, FBGEMM 1.9.0. tests/recsys_core/patches has a test per patch that fails when the
installed version no longer needs it, and `python -m benchmarks.train --parts patches` measures what each is worth.

| patch | upstream |
|---|---|
| cpu_features.share_cpu_features | torch has two copies of cpuinfo, FBGEMM reads the empty one: pytorch/pytorch#166703 |
| lookups.BagSharder | no row-wise sharding on a CPU: meta-pytorch/torchrec#1252 |
| lookups.RowSharder, rows of fused tables | FBGEMM's CPU kernel for rows that are not pooled is not tuned; no issue |
| lookups.RowSharder, rows of replicated tables | the dense CPU kernel pools whatever its mode is: pytorch/FBGEMM#4586 |
| lookups.RowSharder, ranks without rows | the fused CPU kernel refuses a table without rows; no issue |
| rank.prepare_rank | no patch of a library: how the kernel and glibc treat a rank that trains on a CPU |
"""
