"""Workarounds for torch, TorchRec and FBGEMM. Versions: torch 2.14.1, TorchRec 1.9.2, FBGEMM 1.9.0.

Each workaround has a test in tests/recsys_core/patches that fails when the installed version no longer needs it.
`python -m benchmarks.train --parts patches` measures the effect of each.

| workaround | upstream issue | test |
|---|---|---|
| cpu_features.share_cpu_features | torch has 2 copies of cpuinfo: pytorch/pytorch#166703 | test_share_cpu_features_is_needed |
| lookups.BagSharder | no row-wise sharding on CPUs: meta-pytorch/torchrec#1252 | test_bag_sharder_is_needed |
| lookups.dense_rows | the dense CPU kernel ignores its pooling mode: pytorch/FBGEMM#4586 | test_dense_rows_is_needed |
| lookups.bags_of_one | the unpooled CPU kernel is slow; no issue | test_bags_of_one_is_measured_again_when_fbgemm_changes |
| lookups.bags_of_one, empty shards | the fused CPU kernel rejects empty tables; no issue | test_empty_shards_are_needed |
| rank.prepare_rank | core affinity and scheduling policy of CPU ranks; no workaround of a library | - |
"""
