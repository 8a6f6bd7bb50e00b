"""Structured output: ids that keep a request's text inside a JSON schema, regex, choice or grammar."""
