// The web console: login, navigation, and the live state that the pages show.

import { html, render, useEffect, useRef, useState } from "./vendor-htm-preact.js";
import { Live, logIn, logOut } from "./api.js";
import { Field, Notice, fieldsOf } from "./parts.js";
import { OverviewPage } from "./page-overview.js";
import { PartitionsPage } from "./page-partitions.js";
import { ConsumersPage } from "./page-consumers.js";
import { DocumentsPage } from "./page-documents.js";
import { BenchPage } from "./page-bench.js";

const PAGES = [
  { id: "overview", title: "Overview", view: OverviewPage, shows: "overview" },
  { id: "partitions", title: "Partitions", view: PartitionsPage, shows: "partitions" },
  { id: "consumers", title: "Consumers", view: ConsumersPage, shows: "consumers" },
  { id: "documents", title: "Documents", view: DocumentsPage, shows: "none", needs: (me) => me.may.read_documents },
  { id: "bench", title: "Test bench", view: BenchPage, shows: "none", needs: (me) => me.is_test_mode && me.may.operate },
];
const POINTS_MAX = 1800; // an hour

const pageNow = () => location.hash.replace(/^#\//, "") || "overview";

function Login({ onIn, message }) {
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const form = useRef();
  useEffect(() => form.current.elements.user.focus(), []);
  async function submit(event) {
    event.preventDefault();
    const { user, password } = fieldsOf(event.target);
    setBusy(true);
    try {
      onIn(await logIn(user, password));
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  }
  return html`<main class="login"><h1>dcpd</h1>
    ${message && !error && html`<${Notice} text=${message} />`}
    <form onSubmit=${submit} ref=${form}>
      <${Field} label="User" name="user" required autocomplete="username" />
      <${Field} label="Password" name="password" type="password" required autocomplete="current-password" />
      <button disabled=${isBusy}>Log in</button>
    </form>
    <${Notice} error=${error} />
    <p class="hint">It is the login of the API. On the server's own machine guest and guest work, unless
      that is switched off. The login is kept in this page only: a reload asks again.</p>
  </main>`;
}

// Adds new points to those that are there, and forgets what is older than an hour.
function joined(before, times, figures) {
  const all = { times: [...before.times, ...times].slice(-POINTS_MAX), figures: {} };
  for (const [name, values] of Object.entries(figures)) {
    all.figures[name] = [...(before.figures[name] ?? []), ...values].slice(-POINTS_MAX);
  }
  return all;
}

const NOTHING = { times: [], figures: {} };

function joinedLags(before, consumers) {
  const lags = new Map();
  for (const consumer of consumers) {
    const known = before.get(consumer.name) ?? { times: [], values: [] };
    lags.set(consumer.name, {
      times: [...known.times, ...consumer.times].slice(-POINTS_MAX),
      values: [...known.values, ...consumer.lags].slice(-POINTS_MAX),
    });
  }
  return lags;
}

// The newest state of the page, from its stream of events.
function useLive(show, onMe, onRefused) {
  const [live, setLive] = useState({ head: null, link: "first" });
  useEffect(() => {
    setLive((before) => ({ head: before.head, link: before.link }));
    const stream = new Live(show, {
      state: (state, isNewRun) => setLive((before) => {
        const next = { ...before, head: state.head, show, [show]: state[show] };
        if (state.overview) {
          const hour = isNewRun || !before.hour ? NOTHING : before.hour;
          next.hour = joined(hour, state.overview.times, state.overview.figures);
        }
        if (state.consumers) {
          const lags = isNewRun || !before.lags ? new Map() : before.lags;
          next.lags = joinedLags(lags, state.consumers.consumers);
        }
        return next;
      }),
      link: (isUp) => setLive((before) => ({ ...before, link: isUp ? "up" : "down" })),
      me: onMe,
      refused: onRefused,
    });
    return () => stream.stop();
  }, [show]);
  return live;
}

function Console({ me, setMe, leave }) {
  const pages = PAGES.filter((page) => !page.needs || page.needs(me));
  const [id, setId] = useState(pageNow());
  const page = pages.find((one) => one.id === id) ?? pages[0];
  const main = useRef();
  useEffect(() => {
    const follow = () => setId(pageNow());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    document.title = `${page.title} – dcpd`;
    main.current.focus();
  }, [page.id]);
  const refused = (error) => leave(error.status === 401 ? "Please log in again." : error.message);
  const live = useLive(page.shows, setMe, refused);
  const View = page.view;
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>To the content</a>
    <header>
      <span class="brand">dcpd</span>
      <nav aria-label="Pages">${pages.map((one) => html`<a href="#/${one.id}"
        aria-current=${one.id === page.id ? "page" : undefined}>${one.title}</a>`)}</nav>
      <span class="who">${me.user} <button onClick=${() => leave("You are logged out.")}>Log out</button></span>
    </header>
    <p class="link ${live.link}" role="status">${live.link === "down"
      ? "The server cannot be reached. What you see may be old. Trying again…" : ""}</p>
    ${me.is_test_mode && page.id !== "bench" && html`<p class="banner thin" role="note">This server is in test mode.</p>`}
    <main id="main" tabindex="-1" ref=${main} class=${live.link === "down" ? "stale" : ""} data-sample=${live.head?.sample}
        data-boot=${live.head?.boot}>
      <h1>${page.title}</h1>
      ${live.head
        ? html`<${View} key=${page.id} head=${live.head} state=${live[page.shows]} hour=${live.hour} lags=${live.lags} may=${me.may} />`
        : html`<p class="loading" role="status">Connecting…</p>`}
    </main>`;
}

function App() {
  const [me, set] = useState(null);
  const setMe = (found) => set((before) =>
    JSON.stringify(before) === JSON.stringify(found) ? before : found);
  const [message, setMessage] = useState("");
  function leave(text) {
    logOut();
    setMessage(text);
    setMe(null);
  }
  return me ? html`<${Console} me=${me} setMe=${setMe} leave=${leave} />`
            : html`<${Login} onIn=${setMe} message=${message} />`;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
