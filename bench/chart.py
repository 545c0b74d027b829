"""Bar charts as SVG."""

from xml.sax.saxutils import escape

ROW, LABEL, BAR, NUMBER = 26, 530, 290, 60


def bars(title, rows):
    """A chart of (label, factor) rows, whose bars are as long as the factors' parts of the largest."""
    width, height = LABEL + BAR + NUMBER, ROW * (len(rows) + 1) + 8
    largest = max(factor for _, factor in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{width / 2:g}" y="{ROW - 8}" text-anchor="middle" font-weight="bold">{escape(title)}</text>',
    ]
    for at, (label, factor) in enumerate(rows, 1):
        top, long = ROW * at, BAR * factor / largest
        lines += [
            f'<text x="{LABEL - 8}" y="{top + 17}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABEL}" y="{top + 4}" width="{long:.1f}" height="{ROW - 8}" fill="#6e4a9e"/>',
            f'<text x="{LABEL + long + 6:.1f}" y="{top + 17}">{factor:.3g}x</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
