"""The CPU device: attention, fused layers, kernels in C++, memory in huge pages.

| part | CPU | CUDA |
|---|---|---|
| weights | `fused/packing` | `fused/replace` |
| inputs of a step | `decode_inputs` | `graph_inputs` |
| layers | `fused/layer_run` | `fused/modules` |
| attention | `attention` | `attention/triton` |
| head and token | `kernels/draw` | `draw` |
| memory | `huge_pages` | `pinned_pool` |

`device` joins the parts to `engine.device.Device`.

Belongs here: what runs on a CPU only. Nothing here imports `cuda`.
"""
