// The web console: login, navigation, and the live state that the pages show.

import { html, render, useEffect, useRef, useState } from "./vendor-htm-preact.js";
import { Live, logIn, logOut, whoIsIn } from "./api.js";
import { Field, Notice, fieldsOf, healthOf } from "./parts.js";
import { ClusterPage } from "./page-cluster.js";
import { OverviewPage } from "./page-overview.js";
import { PartitionsPage } from "./page-partitions.js";
import { ChangesPage } from "./page-changes.js";
import { ConsumersPage } from "./page-consumers.js";
import { DocumentsPage } from "./page-documents.js";

const reads = (me) => me.may.read_documents;
const operates = (me) => me.may.operate;

// Pages that few people open are loaded when somebody does.
const loaded = (file, name) => function Loaded(props) {
  const [View, setView] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => { import(file).then((module) => setView(() => module[name]), setError); }, []);
  if (error) return html`<${Notice} error=${error} />`;
  return View ? html`<${View} ...${props} />` : html`<p class="loading" role="status">Loading…</p>`;
};
const MANAGE = "./page-manage.js";
const PAGES = [
  { id: "overview", title: "Overview", view: OverviewPage, shows: "overview", group: "Server" },
  { id: "cluster", title: "Cluster", view: ClusterPage, shows: "none", group: "Server" },
  { id: "partitions", title: "Partitions", view: PartitionsPage, shows: "partitions", group: "Server" },
  { id: "documents", title: "Documents", view: DocumentsPage, shows: "none", group: "Data", needs: reads },
  { id: "changes", title: "Changes", view: ChangesPage, shows: "none", group: "Data", needs: reads },
  { id: "consumers", title: "Consumers", view: ConsumersPage, shows: "consumers", group: "Data" },
  { id: "collections", title: "Collections", view: loaded(MANAGE, "CollectionsPage"), shows: "none", group: "Data" },
  { id: "users", title: "Users", view: loaded(MANAGE, "UsersPage"), shows: "none", group: "Manage", needs: operates },
  { id: "backups", title: "Backups", view: loaded(MANAGE, "BackupsPage"), shows: "none", group: "Manage", needs: operates },
  { id: "settings", title: "Settings", view: loaded(MANAGE, "SettingsPage"), shows: "none", group: "Manage", needs: operates },
  { id: "log", title: "Log", view: loaded(MANAGE, "LogPage"), shows: "none", group: "Manage", needs: operates },
  { id: "bench", title: "Test bench", view: loaded("./page-bench.js", "BenchPage"), shows: "none", group: "Manage",
    needs: (me) => me.is_test_mode && me.may.operate },
];
const POINTS_MAX = 1800; // an hour

// The page of the address, "" for none, and what follows it: "#/documents/scope.collection/key".
const placeNow = () => location.hash.replace(/^#\//, "").split("/").map(decodeURIComponent);

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
  // The text of the API tells programs what to send; in a form it is enough what was wrong.
  const wrong = error?.status === 401 ? { text: "You are not logged in: " + error.why + "." } : { error };
  return html`<main class="login"><h1><span class="brand">dcpd</span></h1>
    ${message && !error && html`<${Notice} text=${message} />`}
    <form onSubmit=${submit} ref=${form} class="card">
      <${Field} label="User" name="user" required autocomplete="username" />
      <${Field} label="Password" name="password" type="password" required autocomplete="current-password" />
      <button disabled=${isBusy}>Log in</button>
      ${error && html`<${Notice} ...${wrong} isBad />`}
    </form>
    <p class="hint">It is the login of the API. On the server's own machine guest and guest work, unless
      that is switched off. You stay logged in until you close the browser, for twelve hours at most.</p>
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
    setLive((before) => ({ head: before.head, cluster: before.cluster, link: before.link }));
    const stream = new Live(show, {
      state: (state, isNewRun) => setLive((before) => {
        const next = { ...before, head: state.head, cluster: state.cluster, show, [show]: state[show] };
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

function Navigation({ pages, page }) {
  const groups = [...new Set(pages.map((one) => one.group))];
  return html`<nav aria-label="Pages">${groups.map((group) => html`<div class="group"><span>${group}</span>
    ${pages.filter((one) => one.group === group).map((one) => html`<a href="#/${one.id}"
      aria-current=${one.id === page.id ? "page" : undefined}>${one.title}</a>`)}</div>`)}</nav>`;
}

function Console({ me, setMe, leave }) {
  const pages = PAGES.filter((page) => !page.needs || page.needs(me));
  const [[id, ...args], setPlace] = useState(placeNow());
  const [home, setHome] = useState("overview");
  const page = pages.find((one) => one.id === (id || home)) ?? pages[0];
  const main = useRef();
  useEffect(() => {
    const follow = () => setPlace(placeNow());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    document.title = `${page.title} – dcpd`;
    main.current.focus();
    document.querySelector("nav [aria-current]")?.scrollIntoView?.({ block: "nearest", inline: "center" });
  }, [page.id]);
  const refused = (error) => leave(error.status === 401 ? "Please log in again." : error.message);
  const live = useLive(page.shows, setMe, refused);
  const isMember = live.cluster != null;
  useEffect(() => { if (isMember) setHome("cluster"); }, [isMember]);
  const View = page.view;
  const health = live.head && healthOf(live.head, live.cluster);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>To the content</a>
    <header>
      <span class="brand">dcpd</span>
      ${health && html`<a class="pill ${health.kind}" href=${isMember ? "#/cluster" : "#/overview"}><i></i>${health.text}</a>`}
      <span class="who"><span>${me.user}</span>${" "}<button onClick=${() => leave("You are logged out.")}>Log out</button></span>
    </header>
    <${Navigation} pages=${pages} page=${page} />
    <main id="main" tabindex="-1" ref=${main} class=${live.link === "down" ? "stale" : ""} data-sample=${live.head?.sample}
        data-boot=${live.head?.boot}>
      <p class="link ${live.link}" role="status">${live.link === "down"
        ? "The server cannot be reached. What you see may be old. Trying again…" : ""}</p>
      ${me.is_test_mode && page.id !== "bench" && html`<p class="banner thin" role="note">This server is in test mode.</p>`}
      <h1>${page.title}</h1>
      ${live.head
        ? html`<${View} key=${page.id} head=${live.head} cluster=${live.cluster} state=${live[page.shows]} hour=${live.hour}
            lags=${live.lags} may=${me.may} args=${args} />`
        : html`<p class="loading" role="status">Connecting…</p>`}
    </main>`;
}

function App() {
  const [me, set] = useState(undefined); // undefined: not known yet; null: nobody
  const setMe = (found) => set((before) =>
    JSON.stringify(before) === JSON.stringify(found) ? before : found);
  const [message, setMessage] = useState("");
  useEffect(() => { whoIsIn().then(setMe, () => setMe(null)); }, []);
  function leave(text) {
    logOut();
    setMessage(text);
    setMe(null);
  }
  if (me === undefined) return html`<p class="loading" role="status">dcpd</p>`;
  return me ? html`<${Console} me=${me} setMe=${setMe} leave=${leave} />`
            : html`<${Login} onIn=${setMe} message=${message} />`;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
