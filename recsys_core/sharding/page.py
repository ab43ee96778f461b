def to_html(plan: object) -> str:
    return ""
