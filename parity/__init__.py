"""Do two frameworks compute the same function? This file imports nothing, so that --help stays fast."""
