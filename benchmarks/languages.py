"""How often the instructions family tells a text's language rightly: sentences of 36 languages, and texts of none.

    python benchmarks/languages.py          # needs the extra [instructions]

The sentences below were written for this: per language two short ones (two to five words), two of a line, and one of
two lines. For each length it prints the texts told rightly, wrongly and not told (no language, so that no constraint on
one is followed), then the texts that are of no language or of one that no constraint can ask for. With --peers it
prints the same for what the library says without a threshold.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from tinyllm.rewards.text.languages import LANGUAGES, language_of

SENTENCES = {
    "ar": ("نعم، بالطبع.", "أين المكتبة؟", "ذهبنا إلى السوق صباح اليوم لشراء الخضار.", "الماء يغلي عند مئة درجة على مستوى البحر.",
           "كتبت الطالبة رسالة طويلة إلى جدتها، ثم وضعتها في الظرف وأرسلتها بالبريد قبل أن يغلق المكتب."),
    "bg": ("Да, разбира се.", "Къде е гарата?", "Тази сутрин отидохме на пазара за зеленчуци.", "Водата кипи при сто градуса на морското равнище.",
           "Ученичката написа дълго писмо на баба си, сложи го в плик и го изпрати по пощата, преди да затворят."),
    "bn": ("হ্যাঁ, অবশ্যই।", "স্টেশন কোথায়?", "আজ সকালে আমরা সবজি কিনতে বাজারে গিয়েছিলাম।", "সমুদ্রপৃষ্ঠে পানি একশ ডিগ্রিতে ফোটে।",
           "মেয়েটি তার দাদিকে একটি লম্বা চিঠি লিখল, খামে ভরল এবং অফিস বন্ধ হওয়ার আগেই ডাকে পাঠিয়ে দিল।"),
    "de": ("Ja, natürlich.", "Wo liegt der Bahnhof?", "Heute Morgen gingen wir zum Markt und kauften Gemüse.", "Wasser kocht auf Meereshöhe bei hundert Grad.",
           "Die Schülerin schrieb ihrer Großmutter einen langen Brief, steckte ihn in einen Umschlag und brachte ihn zur Post, bevor sie schloss."),
    "el": ("Ναι, φυσικά.", "Πού είναι ο σταθμός;", "Σήμερα το πρωί πήγαμε στην αγορά για λαχανικά.", "Το νερό βράζει στους εκατό βαθμούς.",
           "Η μαθήτρια έγραψε ένα μεγάλο γράμμα στη γιαγιά της, το έβαλε σε φάκελο και το έστειλε πριν κλείσει το ταχυδρομείο."),
    "en": ("Yes, of course.", "Where is the station?", "We walked to the market this morning to buy vegetables.", "Water boils at one hundred degrees at sea level.",
           "The pupil wrote a long letter to her grandmother, put it into an envelope and posted it before the office closed."),
    "es": ("Sí, por supuesto.", "¿Dónde queda la estación?", "Esta mañana fuimos al mercado a comprar verduras.", "El agua hierve a cien grados al nivel del mar.",
           "La alumna escribió una larga carta a su abuela, la metió en un sobre y la envió antes de que cerrara la oficina."),
    "fa": ("بله، البته.", "ایستگاه کجاست؟", "امروز صبح برای خرید سبزی به بازار رفتیم.", "آب در سطح دریا در صد درجه می‌جوشد.",
           "دانش‌آموز نامه‌ای بلند برای مادربزرگش نوشت، آن را در پاکت گذاشت و پیش از بسته شدن اداره پست کرد."),
    "fi": ("Kyllä, tietysti.", "Missä asema on?", "Kävimme tänä aamuna torilla ostamassa vihanneksia.", "Vesi kiehuu merenpinnan tasolla sadassa asteessa.",
           "Oppilas kirjoitti isoäidilleen pitkän kirjeen, pani sen kuoreen ja vei sen postiin ennen kuin se suljettiin."),
    "fr": ("Oui, bien sûr.", "Où est la gare ?", "Ce matin nous sommes allés au marché acheter des légumes.", "L'eau bout à cent degrés au niveau de la mer.",
           "L'élève a écrit une longue lettre à sa grand-mère, l'a glissée dans une enveloppe et l'a postée avant la fermeture du bureau."),
    "gu": ("હા, ચોક્કસ.", "સ્ટેશન ક્યાં છે?", "આજે સવારે અમે શાક ખરીદવા બજારમાં ગયા હતા.", "દરિયાની સપાટીએ પાણી સો ડિગ્રીએ ઊકળે છે.",
           "વિદ્યાર્થિનીએ તેની દાદીને લાંબો પત્ર લખ્યો, તેને કવરમાં મૂક્યો અને કચેરી બંધ થાય તે પહેલાં ટપાલમાં નાખ્યો."),
    "he": ("כן, כמובן.", "איפה התחנה?", "הבוקר הלכנו לשוק כדי לקנות ירקות.", "מים רותחים במאה מעלות בגובה פני הים.",
           "התלמידה כתבה מכתב ארוך לסבתה, הכניסה אותו למעטפה ושלחה אותו לפני שהדואר נסגר."),
    "hi": ("हाँ, ज़रूर।", "स्टेशन कहाँ है?", "आज सुबह हम सब्ज़ी खरीदने बाज़ार गए थे।", "समुद्र तल पर पानी सौ डिग्री पर उबलता है।",
           "छात्रा ने अपनी दादी को एक लंबा पत्र लिखा, उसे लिफ़ाफ़े में रखा और दफ़्तर बंद होने से पहले डाक में डाल दिया।"),
    "hy": ("Այո, իհարկե։", "Որտե՞ղ է կայարանը։", "Այսօր առավոտյան գնացինք շուկա բանջարեղեն գնելու։", "Ջուրը ծովի մակարդակում եռում է հարյուր աստիճանում։",
           "Աշակերտուհին երկար նամակ գրեց տատիկին, դրեց ծրարի մեջ և ուղարկեց, մինչև փոստը կփակվեր։"),
    "it": ("Sì, certamente.", "Dov'è la stazione?", "Stamattina siamo andati al mercato a comprare la verdura.", "L'acqua bolle a cento gradi al livello del mare.",
           "L'alunna scrisse una lunga lettera alla nonna, la mise in una busta e la spedì prima che l'ufficio chiudesse."),
    "ja": ("はい、もちろん。", "駅はどこですか。", "今朝、野菜を買いに市場へ行きました。", "海面では水は百度で沸騰します。",
           "生徒は祖母に長い手紙を書き、封筒に入れて、郵便局が閉まる前に出しました。"),
    "ka": ("დიახ, რა თქმა უნდა.", "სად არის სადგური?", "დღეს დილით ბაზარში წავედით ბოსტნეულის საყიდლად.", "ზღვის დონეზე წყალი ას გრადუსზე დუღს.",
           "მოსწავლემ ბებიას გრძელი წერილი მისწერა, კონვერტში ჩადო და გაგზავნა, სანამ ფოსტა დაიკეტებოდა."),
    "kn": ("ಹೌದು, ಖಂಡಿತ.", "ನಿಲ್ದಾಣ ಎಲ್ಲಿದೆ?", "ಇಂದು ಬೆಳಿಗ್ಗೆ ನಾವು ತರಕಾರಿ ಕೊಳ್ಳಲು ಮಾರುಕಟ್ಟೆಗೆ ಹೋದೆವು.", "ಸಮುದ್ರ ಮಟ್ಟದಲ್ಲಿ ನೀರು ನೂರು ಡಿಗ್ರಿಯಲ್ಲಿ ಕುದಿಯುತ್ತದೆ.",
           "ವಿದ್ಯಾರ್ಥಿನಿ ತನ್ನ ಅಜ್ಜಿಗೆ ಉದ್ದವಾದ ಪತ್ರ ಬರೆದು, ಲಕೋಟೆಯಲ್ಲಿ ಇಟ್ಟು, ಕಚೇರಿ ಮುಚ್ಚುವ ಮೊದಲು ಅಂಚೆಗೆ ಹಾಕಿದಳು."),
    "ko": ("네, 물론이죠.", "역이 어디에 있나요?", "오늘 아침에 우리는 채소를 사러 시장에 갔습니다.", "바다 높이에서 물은 백 도에서 끓습니다.",
           "학생은 할머니께 긴 편지를 써서 봉투에 넣고 우체국이 닫기 전에 부쳤습니다."),
    "ml": ("അതെ, തീർച്ചയായും.", "സ്റ്റേഷൻ എവിടെയാണ്?", "ഇന്ന് രാവിലെ ഞങ്ങൾ പച്ചക്കറി വാങ്ങാൻ ചന്തയിൽ പോയി.", "സമുദ്രനിരപ്പിൽ വെള്ളം നൂറു ഡിഗ്രിയിൽ തിളയ്ക്കുന്നു.",
           "വിദ്യാർത്ഥിനി മുത്തശ്ശിക്ക് ഒരു നീണ്ട കത്ത് എഴുതി, കവറിലാക്കി, ഓഫീസ് അടയ്ക്കുന്നതിന് മുമ്പ് അയച്ചു."),
    "mr": ("हो, नक्कीच.", "स्थानक कुठे आहे?", "आज सकाळी आम्ही भाजी घेण्यासाठी बाजारात गेलो होतो.", "समुद्रसपाटीला पाणी शंभर अंशांवर उकळते.",
           "विद्यार्थिनीने तिच्या आजीला एक लांब पत्र लिहिले, ते पाकिटात ठेवले आणि कार्यालय बंद होण्यापूर्वी टपालात टाकले."),
    "ne": ("हो, पक्कै पनि।", "स्टेसन कहाँ छ?", "आज बिहान हामी तरकारी किन्न बजार गयौं।", "समुद्री सतहमा पानी सय डिग्रीमा उम्लिन्छ।",
           "विद्यार्थीले आफ्नी हजुरआमालाई लामो चिठी लेखी, खाममा राखी र कार्यालय बन्द हुनुअघि हुलाकमा पठाई।"),
    "nl": ("Ja, natuurlijk.", "Waar ligt het station?", "Vanochtend gingen we naar de markt om groente te kopen.", "Water kookt op zeeniveau bij honderd graden.",
           "De leerlinge schreef een lange brief aan haar grootmoeder, deed hem in een envelop en bracht hem naar het postkantoor voordat het sloot."),
    "pa": ("ਹਾਂ, ਜ਼ਰੂਰ।", "ਸਟੇਸ਼ਨ ਕਿੱਥੇ ਹੈ?", "ਅੱਜ ਸਵੇਰੇ ਅਸੀਂ ਸਬਜ਼ੀ ਖਰੀਦਣ ਬਾਜ਼ਾਰ ਗਏ ਸੀ।", "ਸਮੁੰਦਰ ਦੇ ਪੱਧਰ ਉੱਤੇ ਪਾਣੀ ਸੌ ਡਿਗਰੀ ਤੇ ਉਬਲਦਾ ਹੈ।",
           "ਵਿਦਿਆਰਥਣ ਨੇ ਆਪਣੀ ਦਾਦੀ ਨੂੰ ਇੱਕ ਲੰਮੀ ਚਿੱਠੀ ਲਿਖੀ, ਲਿਫ਼ਾਫ਼ੇ ਵਿੱਚ ਪਾਈ ਅਤੇ ਦਫ਼ਤਰ ਬੰਦ ਹੋਣ ਤੋਂ ਪਹਿਲਾਂ ਡਾਕ ਵਿੱਚ ਪਾ ਦਿੱਤੀ।"),
    "pl": ("Tak, oczywiście.", "Gdzie jest dworzec?", "Dziś rano poszliśmy na targ po warzywa.", "Na poziomie morza woda wrze w stu stopniach.",
           "Uczennica napisała długi list do babci, włożyła go do koperty i wysłała, zanim zamknięto pocztę."),
    "pt": ("Sim, com certeza.", "Onde fica a estação?", "Hoje de manhã fomos ao mercado comprar legumes.", "A água ferve a cem graus ao nível do mar.",
           "A aluna escreveu uma longa carta à avó, colocou-a num envelope e enviou-a antes que o correio fechasse."),
    "ru": ("Да, конечно.", "Где находится вокзал?", "Сегодня утром мы ходили на рынок за овощами.", "На уровне моря вода кипит при ста градусах.",
           "Ученица написала бабушке длинное письмо, положила его в конверт и отправила, пока почта не закрылась."),
    "sv": ("Ja, naturligtvis.", "Var ligger stationen?", "I morse gick vi till torget för att köpa grönsaker.", "Vatten kokar vid hundra grader vid havsytan.",
           "Eleven skrev ett långt brev till sin mormor, lade det i ett kuvert och postade det innan kontoret stängde."),
    "sw": ("Ndiyo, bila shaka.", "Kituo kiko wapi?", "Leo asubuhi tulikwenda sokoni kununua mboga.", "Maji huchemka kwa nyuzi joto mia moja.",
           "Mwanafunzi alimwandikia bibi yake barua ndefu, akaiweka kwenye bahasha na kuituma kabla ofisi haijafungwa."),
    "ta": ("ஆம், நிச்சயமாக.", "நிலையம் எங்கே இருக்கிறது?", "இன்று காலை நாங்கள் காய்கறி வாங்க சந்தைக்குச் சென்றோம்.", "கடல் மட்டத்தில் நீர் நூறு டிகிரியில் கொதிக்கிறது.",
           "மாணவி தன் பாட்டிக்கு நீண்ட கடிதம் எழுதி, உறையில் வைத்து, அலுவலகம் மூடும் முன் அஞ்சலில் அனுப்பினாள்."),
    "te": ("అవును, తప్పకుండా.", "స్టేషన్ ఎక్కడ ఉంది?", "ఈ ఉదయం మేము కూరగాయలు కొనడానికి మార్కెట్‌కు వెళ్ళాము.", "సముద్ర మట్టంలో నీరు వంద డిగ్రీల వద్ద మరుగుతుంది.",
           "విద్యార్థిని తన అమ్మమ్మకు పొడవైన ఉత్తరం రాసి, కవరులో పెట్టి, కార్యాలయం మూసే ముందు పంపింది."),
    "th": ("ใช่ แน่นอน", "สถานีอยู่ที่ไหน", "เช้านี้เราไปตลาดเพื่อซื้อผัก", "น้ำเดือดที่หนึ่งร้อยองศาที่ระดับน้ำทะเล",
           "นักเรียนเขียนจดหมายยาวถึงคุณยาย ใส่ซองแล้วส่งก่อนที่ไปรษณีย์จะปิด"),
    "tr": ("Evet, tabii ki.", "İstasyon nerede?", "Bu sabah sebze almak için pazara gittik.", "Su deniz seviyesinde yüz derecede kaynar.",
           "Öğrenci büyükannesine uzun bir mektup yazdı, onu bir zarfa koydu ve postane kapanmadan önce gönderdi."),
    "uk": ("Так, звичайно.", "Де знаходиться вокзал?", "Сьогодні вранці ми ходили на ринок по овочі.", "На рівні моря вода кипить при ста градусах.",
           "Учениця написала бабусі довгого листа, поклала його в конверт і надіслала, поки пошта не зачинилася."),
    "ur": ("جی ہاں، ضرور۔", "اسٹیشن کہاں ہے؟", "آج صبح ہم سبزی خریدنے بازار گئے تھے۔", "سطح سمندر پر پانی سو ڈگری پر ابلتا ہے۔",
           "طالبہ نے اپنی دادی کو ایک لمبا خط لکھا، اسے لفافے میں رکھا اور دفتر بند ہونے سے پہلے ڈاک میں ڈال دیا۔"),
    "vi": ("Vâng, tất nhiên.", "Nhà ga ở đâu?", "Sáng nay chúng tôi đi chợ mua rau.", "Nước sôi ở một trăm độ tại mực nước biển.",
           "Cô học sinh viết một bức thư dài cho bà, bỏ vào phong bì và gửi đi trước khi bưu điện đóng cửa."),
    "zh": ("是的，当然。", "车站在哪里？", "今天早上我们去市场买蔬菜。", "在海平面，水在一百度沸腾。",
           "女学生给奶奶写了一封长信，装进信封，在邮局关门之前寄了出去。"),
}  # fmt: skip
OTHERS = (
    "", "42", "3.14 + 2 = 5.14", "...", "?!", "xqz", "qwrtp zxcvb", "Hmmm", "def f(x): return x", "<answer>7</answer>",
    "https://example.org/a/b", "AAAA BBBB CCCC", "\u2211 \u222b \u221a", "\U0001f600\U0001f600", "a b c d e", "x = y + z",
    # Languages that no constraint can ask for
    "Kde je nádraží? Dnes ráno jsme šli na trh koupit zeleninu.", "Hvor ligger stationen? I morges gik vi på torvet for at købe grøntsager.",
    "Hol van az állomás? Ma reggel elmentünk a piacra zöldséget venni.", "Unde este gara? Azi dimineață am mers la piață să cumpărăm legume.",
    "Waar is die stasie? Vanoggend het ons groente by die mark gaan koop.", "Kur yra stotis? Šį rytą ėjome į turgų pirkti daržovių.",
    "Tá an stáisiún ansin. Chuamar go dtí an margadh ar maidin.", "Onsɛn bɛn wo he? Ɛnnɛ anɔpa yɛkɔɔ gua so.",
)  # fmt: skip
"""Texts for which no language of ours may be named."""
LENGTHS = (("short", (0, 1)), ("one line", (2, 3)), ("two lines", (4,)))


def counts(tell: Callable[[str], str | None], places: tuple[int, ...]) -> tuple[int, int, int, list[str]]:
    """(right, wrong, not told, what was told wrongly) over the sentences at these places of each language."""
    right = untold = 0
    wrong = []
    for language, sentences in SENTENCES.items():
        for place in places:
            told = tell(sentences[place])
            right += told == language
            untold += told is None
            if told not in (language, None):
                wrong.append(f"{language} told as {told}: {sentences[place]}")
    return right, len(wrong), untold, wrong


def report(name: str, tell: Callable[[str], str | None]) -> None:
    """Print one detector's numbers."""
    print(name)
    for length, places in LENGTHS:
        right, wrong, untold, shown = counts(tell, places)
        whole = right + wrong + untold
        print(f"  {length:10} {right:3} of {whole} right ({right / whole:.1%}), {wrong} wrong, {untold} not told")
        for line in shown:
            print(f"    {line}")
    named = [f"{text[:60]!r} told as {told}" for text in OTHERS if (told := tell(text)) in LANGUAGES]
    print(f"  of no language of ours: {len(named)} of {len(OTHERS)} told as one")
    for line in named:
        print(f"    {line}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="also the library's own answer, without a threshold")
    assert SENTENCES.keys() == LANGUAGES, SENTENCES.keys() ^ LANGUAGES
    report("language_of", language_of)
    if parser.parse_args().peers:
        import py3langid

        report("py3langid, no threshold", lambda text: py3langid.classify(text)[0])


if __name__ == "__main__":
    main()
