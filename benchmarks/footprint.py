"""GPU memory that a server's KV cache takes."""

from __future__ import annotations


def gpu_kv_bytes(server) -> int:
    """Ours: D, windows and P tiles, which stay; prefill staging and workspaces come and go. Stock: its pool."""
    if server.ours is None:
        return int(sum(server.runner.kv_pool.get_kv_size_bytes()))  # NumPy integers
    sizes, shape = server.ours.regions.sizes, server.ours.regions.shape
    return server.ours.regions.device_bytes + 2 * sizes.tile_pages * shape.parts * shape.block_bytes
