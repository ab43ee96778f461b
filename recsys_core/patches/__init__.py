"""Workarounds for torch 2.14.1, TorchRec 1.9.2 and FBGEMM 1.9.0.

Each workaround has a test in tests/recsys_core/patches that fails when the installed version no longer needs it.
`python -m benchmarks.train --parts patches` measures the effect of each workaround.

| workaround | upstream issue | test |
|---|---|---|
| cpu_features.share_cpu_features | torch has 2 copies of cpuinfo: pytorch/pytorch#166703 | test_share_cpu_features_is_needed |
| lookups.BagSharder | no row-wise sharding on CPUs: meta-pytorch/torchrec#1252 | test_bag_sharder_is_needed |
| lookups.dense_lookup | the dense CPU kernel ignores its pooling mode: pytorch/FBGEMM#4586 | test_dense_lookup_is_needed |
| lookups.unpooled_fused_lookup | the unpooled CPU kernel is slow; no issue | test_fused_lookup_is_for_the_installed_fbgemm |
| lookups.unpooled_fused_lookup, empty shards | the CPU kernel rejects empty tables; no issue | test_empty_shards_are_needed |
"""
