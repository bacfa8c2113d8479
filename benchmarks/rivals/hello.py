"""What torchrun starts to compare with: one all-reduce, then the end."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
assert int(ones) == dist.get_world_size()
dist.destroy_process_group()
