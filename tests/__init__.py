"""Makes this folder the package `tests`, whatever dependency installs one of that name."""
