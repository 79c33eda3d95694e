"""The conformance kit's difficult server: it plays scenarios for a consumer and judges it."""
