"""The backends over torch's process groups: Gloo and NCCL."""
