"""Runs on NVIDIA FLARE (extra `nvflare`)."""
