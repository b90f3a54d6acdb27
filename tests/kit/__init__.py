"""What tests share: tiny models, data, places, and processes that ask a real engine. No test imports a test."""
