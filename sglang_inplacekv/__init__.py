"""SGLang extension: CPU and GPU attend together over a KV cache whose bytes never move after they were written."""
