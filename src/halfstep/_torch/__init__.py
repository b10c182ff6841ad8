"""Every use of torch's private API: one shim a file, and what is changed in torch."""
