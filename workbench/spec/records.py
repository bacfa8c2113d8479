"""What one rank tells of its steps."""

from __future__ import annotations

# One entry a step in each; seconds and bytes.
# loss: this rank's part of the global mean; the sum over ranks is the loss of the step.
# wall_s: from the end of the step before (so the moment between slices counts) to the end of this;
# after a pause, a command or a cell from the step's own begin.
# forward_s, backward_s, optimizer_s, data_s: computing, and fetching the batch. comm_s: held by
# communication, whether waiting for a partner or for the wire. The remainder of the wall is other.
# sent_bytes: what the kernel sent over the group's connections, else the payload handed over.
PARTS = ("forward_s", "backward_s", "optimizer_s", "data_s", "comm_s")
COLUMNS = ("loss", "wall_s", *PARTS, "sent_bytes")
# One operation of a step that was recorded whole. ranks: of its group. peer: of a message.
# launched_s, done_s: from the begin of the step; done_s None where nobody could tell.
OP_FIELDS = ("kind", "ranks", "peer", "bytes", "launched_s", "done_s")
# The event in a torch profile that begins and ends with the step.
MARKER = "workbench_step"
