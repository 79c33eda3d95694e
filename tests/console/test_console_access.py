"""Who uses the console without a mouse, without much space, in the dark, or by ear."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from support.load import Following

PAGES = (
    "Overview", "Cluster", "Partitions", "Documents", "Changes", "Consumers", "Collections",
    "Users", "Backups", "Settings", "Log", "Test bench",
)  # fmt: skip
# What a screen reader misses: names of controls, texts of pictures, heads of tables.
PROBLEMS = """() => {
  const found = [];
  const name = (one) => (one.getAttribute("aria-label") || one.textContent ||
    (one.labels && one.labels[0]?.textContent) || "").trim();
  for (const one of document.querySelectorAll("button, a, input, select, textarea, meter")) {
    if (!name(one)) found.push("no name: " + one.outerHTML.slice(0, 80));
  }
  for (const one of document.querySelectorAll("table")) {
    if (!one.querySelector("th[scope]")) found.push("no heads: " + one.outerHTML.slice(0, 80));
  }
  for (const one of document.querySelectorAll("svg:not([aria-hidden])")) {
    if (!one.getAttribute("aria-label")) found.push("no text: svg");
  }
  const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) found.push("twice: " + id);
  for (const one of document.querySelectorAll("[aria-labelledby]")) {
    if (!document.getElementById(one.getAttribute("aria-labelledby"))) found.push("points nowhere");
  }
  if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
  if (document.documentElement.scrollWidth > innerWidth) found.push("wider than the window");
  return found;
}"""
# The contrast of every text that is seen, by WCAG 2: at least 4.5.
PALE = """() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (!/, 0\\)$/.test(colour)) return colour;
    }
    return getComputedStyle(document.documentElement).backgroundColor;
  };
  const pale = new Set();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const one = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || one.closest("svg, .hidden, .skip, :disabled")) continue;
    const [high, low] = [light(getComputedStyle(one).color), light(ground(one))]
      .sort((a, b) => b - a);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) pale.add(`${contrast.toFixed(2)} ${one.className} ${one.textContent}`);
  }
  return [...pale];
}"""


def go(page: Page, title: str) -> None:
    page.get_by_role("navigation").get_by_role("link", name=title).click()
    expect(page.get_by_role("heading", level=1, name=title)).to_be_visible()
    expect(page.locator("main .loading")).to_have_count(0)


def test_every_page_fits_a_phone_with_names_and_contrast(log_in, server) -> None:
    with server.connect() as kv:
        kv.set(b"key1", b"x" * 300)
    two_consumers = Following(server.address, "one two"), Following(server.address, "three")
    with two_consumers[0], two_consumers[1]:
        look_at_all_pages(log_in)


def look_at_all_pages(log_in) -> None:
    for scheme in ("light", "dark"):
        page = log_in(viewport={"width": 360, "height": 700}, color_scheme=scheme)
        for title in PAGES:
            go(page, title)
            if title == "Consumers":
                expect(page.get_by_role("region", name="one two")).to_be_visible()
            if title == "Partitions":
                page.get_by_role("gridcell", name="Partition 92, active").click()
                expect(page.locator("svg.tree")).to_be_visible()
            if title == "Documents":
                page.get_by_label("Key", exact=True).fill("key1")
                page.keyboard.press("Enter")
                expect(page.locator("table.history")).to_be_visible()
            assert page.evaluate(PROBLEMS) == [], title
            assert page.evaluate(PALE) == [], (title, scheme)


def test_everything_can_be_reached_with_the_keyboard(log_in) -> None:
    page = log_in()
    page.evaluate("document.querySelector('a, button, input, [tabindex]').focus()")
    reached = [page.evaluate("document.activeElement.textContent")]
    for _ in range(len(PAGES) + 2):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent"))
    assert reached == ["To the content", "Healthy", "Log out", *PAGES]
    page.get_by_role("link", name="Documents").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1, name="Documents")).to_be_visible()
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Collection")).to_be_focused()
    for label in ("Key begins with", "Key"):
        page.keyboard.press("Tab")
        expect(page.get_by_label(label, exact=True)).to_be_focused()
    page.keyboard.type("keyboard:1")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Create").press("Enter")
    expect(page.get_by_label("Value")).to_be_focused()
    page.keyboard.type("typed")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status").filter(has_text="Saved")).to_be_visible()
    page.get_by_role("button", name="Delete").press("Enter")
    expect(page.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator("table.history tbody tr")).to_have_count(1)


def test_a_page_that_is_hidden_asks_for_nothing(log_in) -> None:
    page = log_in()
    hide = """(isHidden) => {
      Object.defineProperty(document, "hidden", {value: isHidden, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.clock.install()
    with page.expect_event("requestfailed", lambda request: "/events" in request.url):
        page.evaluate(hide, True)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(60_000)  # it would try again after a second
    assert asked == []
    with page.expect_request(lambda request: "/events" in request.url):
        page.evaluate(hide, False)
