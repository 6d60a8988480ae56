"""pagedweight: expert precision that gives way to KV cache while the server runs."""

__version__ = "0.1.0.dev0"
