"""What one rank tells of each step; lists by column, one entry a step, seconds and bytes."""

from __future__ import annotations

# loss: this rank's part of the global mean; the sum over ranks is the loss of the step.
# wall_s: from the end of the step before (so a pause between slices counts) to the end of this.
# compute_s: forward, backward, optimizer, without what is held. comm_s: the step was held by
# communication (None where the device runs ahead of the host). data_s: fetching the batch.
# sent_bytes: what the kernel sent over the group's connections, else the payload handed over.
COLUMNS = ("loss", "wall_s", "compute_s", "comm_s", "data_s", "sent_bytes")
