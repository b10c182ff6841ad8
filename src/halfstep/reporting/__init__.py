"""Tables, findings and HTML pages."""
