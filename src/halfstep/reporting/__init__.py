"""Tables, findings and pages of HTML, for people and programs."""
