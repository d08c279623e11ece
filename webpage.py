PAGE = "<!doctype html>"
HEADERS = {}
