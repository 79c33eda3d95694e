// A real browser (Debian's chromium, headless) whose user has logged in to dcpd's admin port, and pages of
// other sites, of a name that was made to resolve to the port, and of the port itself. Argument: JSON with
//   chromium  the program
//   admin     http://127.0.0.1:PORT, the admin port
//   foreign   http://127.0.0.1:OTHER, where a page of another site is
//   rebound   http://evil.example:PORT, where the page is of another site and all else is the admin port
// Prints JSON: for each page, what its requests were answered (HTTP statuses as the browser got them, also
// where the page may not see them) and what the page itself could read.
"use strict";

const { chromium } = require("playwright-core");

const FLAGS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
  // Nothing leaves this machine.
  "--host-resolver-rules=MAP evil.example 127.0.0.2, MAP * ~NOTFOUND, "
    + "EXCLUDE localhost, EXCLUDE 127.0.0.1, EXCLUDE 127.0.0.2",
];
const SCOPES = "/pools/default/buckets/default/scopes";

// Runs in the page. Every attempt gives the status and the text that the page gets to see.
async function attempts({ base, scopes, name }) {
  const login = { authorization: "Basic " + btoa("guest:guest") };
  const json = { "content-type": "application/json" };
  const form = { "content-type": "application/x-www-form-urlencoded" };
  const branch = base + "/api/v1/vbuckets/7/branch";
  const all = { credentials: "include" };
  const wanted = {
    read: [base + "/api/v1/status", { ...all }],
    readWithLogin: [base + "/api/v1/status", { headers: login }],
    readBlindly: [base + "/metrics", { ...all, mode: "no-cors" }],
    post: [branch, { ...all, method: "POST", headers: json, body: '{"at": 0}' }],
    postWithLogin: [branch, { method: "POST", headers: { ...json, ...login }, body: '{"at": 0}' }],
    postBlindly: [branch, { ...all, method: "POST", mode: "no-cors", body: '{"at": 0}' }],
    formBlindly: [
      base + scopes,
      { ...all, method: "POST", mode: "no-cors", headers: form, body: "name=" + name },
    ],
    drop: [base + scopes + "/kept", { ...all, method: "DELETE" }],
  };
  const seen = {};
  for (const [what, [url, options]] of Object.entries(wanted)) {
    try {
      // A browser that is asked for a login waits for its user.
      const answer = await fetch(url, { ...options, signal: AbortSignal.timeout(10000) });
      seen[what] = [answer.status, (await answer.text()).slice(0, 600)];
    } catch (error) {
      seen[what] = [error.name, ""];
    }
  }
  return seen;
}

// Runs in the page: the form submits itself and takes the page with it.
function submitForm({ base, scopes, name }) {
  const form = document.createElement("form");
  form.method = "POST";
  form.action = base + scopes;
  form.innerHTML = `<input name="name" value="${name}">`;
  document.body.appendChild(form);
  form.submit();
}

async function visit(browser, admin, { start, base, name }) {
  const context = await browser.newContext();
  const page = await context.newPage();
  const said = await page.goto(admin.replace("//", "//guest:guest@") + "/whoami");
  const loggedIn = said.status();
  await page.goto(start);
  const statuses = {};
  page.on("response", (answer) => {
    const request = answer.request();
    const path = new URL(answer.url()).pathname;
    (statuses[`${request.method()} ${path}`] ??= []).push(answer.status());
  });
  const seen = await page.evaluate(attempts, { base, scopes: SCOPES, name });
  try {
    const [navigated] = await Promise.all([
      page.waitForEvent("framenavigated", { timeout: 10000 }),
      page.evaluate(submitForm, { base, scopes: SCOPES, name: name + "-submitted" }),
    ]);
    const text = await page.innerText("body", { timeout: 10000 });
    seen.submitted = [navigated.url().slice(-SCOPES.length), text.slice(0, 600)];
  } catch (error) {
    seen.submitted = [error.name, error.message];
  }
  await context.close();
  return { loggedIn, seen, statuses };
}

async function main({ chromium: executablePath, admin, foreign, rebound }) {
  const browser = await chromium.launch({ executablePath, args: FLAGS });
  try {
    const results = {
      foreign: await visit(browser, admin, { start: foreign + "/page", base: admin, name: "foreign" }),
      rebound: await visit(browser, admin, { start: rebound + "/page", base: "", name: "rebound" }),
      own: await visit(browser, admin, { start: admin + "/livez", base: "", name: "own" }),
    };
    console.log(JSON.stringify(results));
  } finally {
    await browser.close();
  }
}

main(JSON.parse(process.argv[2])).catch((error) => {
  console.error(error);
  process.exit(1);
});
