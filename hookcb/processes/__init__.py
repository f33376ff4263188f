"""The processes that train one model together: how they meet, compare and fail."""
