"""Loraplex: one base model and thousands of tenants' LoRA adapters from one paged KV pool."""

__version__ = "0.1.0"
