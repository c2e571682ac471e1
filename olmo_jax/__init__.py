"""OLMo 3 in JAX. Submodules import what they need; this file imports nothing, so that --help stays fast."""
